"""training_code.py in which rank 1 is slow to load while the file `slow-data` is there, and rank 2 to compute with `slow-compute`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import training_code
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.metrics import pace, stragglers
from swarmtrain.trainer.model.transformer import Block

pace.EVERY, stragglers.IN_A_ROW = 0.3, 6


def main() -> None:
    rank, load, forward = os.environ["RANK"], Samples._load, Block.forward

    def slow_load(data: Samples, ids: Any) -> Any:
        _nap("slow-data", rank == "1")
        return load(data, ids)

    def slow_forward(block: Block, *args: Any, **options: Any) -> Any:
        _nap("slow-compute", rank == "2")
        return forward(block, *args, **options)

    Samples._load, Block.forward = slow_load, slow_forward  # type: ignore[method-assign]
    training_code.main()


def _nap(name: str, mine: bool) -> None:
    if mine and Path(name).exists():
        time.sleep(0.03)
