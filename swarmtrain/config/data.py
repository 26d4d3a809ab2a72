"""`data`: what is read."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from swarmtrain.config.base import Section


class DataConfig(Section):
    """Memory-mapped token files. A prefix P stands for P.bin (tokens), P.idx (documents) and P.meta.json."""

    data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the training data.")
    validation_data_prefixes: tuple[Path, ...] = Field((), description="Prefixes of the held-out data.")
