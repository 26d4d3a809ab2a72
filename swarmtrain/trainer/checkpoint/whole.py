"""A checkpoint's parameters, whole and one at a time, whatever the topology that saved them."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import manifest, stage
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage import DTYPES, Reader

_MODEL = "model/"


@dataclass(frozen=True)
class Whole:
    """A checkpoint that is whole."""

    path: Path
    content: Manifest

    @property
    def config(self) -> Config:
        """What it was made by."""
        return Config.model_validate_json(json.dumps(self.content.config))

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a parameter's numbers. Raises CheckpointError if there is none of this name."""
        if _MODEL + name not in self.content.tensors:
            raise CheckpointError(f"has no parameter {name}", place=str(self.path), hint="it is of another model")
        return DTYPES[self.content.tensors[_MODEL + name]["dtype"]]

    def parameter(self, name: str, size: torch.Size | tuple[int, ...]) -> Tensor:
        """Return parameter `name`, which has this size, on the CPU. Raises CheckpointError."""
        values = {_MODEL + name: torch.empty(size, dtype=self.dtype(name))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this process alone reads, as it was asked to
            dcp.load(values, storage_reader=Reader(self.path, self.content.tensors), no_dist=True)
        return values[_MODEL + name]


def find(source: Path) -> Whole:
    """Return the checkpoint `source`, or the newest whole one in it. Raises CheckpointError if there is none."""
    if (source / manifest.NAME).exists():
        content = manifest.read(source)
        manifest.verify(source, content, sorted(content.files))
        return Whole(source, content)
    damage = ""
    for path, content in stage.newest_first(source):
        try:
            manifest.verify(path, content, sorted(content.files))
        except CheckpointError as error:
            damage = damage or f": {error}"
        else:
            return Whole(path, content)
    raise CheckpointError(f"has no checkpoint that is whole{damage}", place=str(source), hint="name the trainer.save_dir of a run")
