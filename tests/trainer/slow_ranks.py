"""training_code.py in which rank 1 loads slowly while the file `slow-data` exists, and rank 2 computes slowly while `slow-compute` does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import training_code
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.health import rank_timing, stragglers
from swarmtrain.trainer.model.transformer import TransformerBlock

rank_timing.MIN_INTERVAL_SECONDS, stragglers.CONSECUTIVE_COMPARISONS = 0.3, 6


def main() -> None:
    rank, original_load, original_forward = os.environ["RANK"], TokenDataset._load_tokens, TransformerBlock.forward

    def slow_load(data: TokenDataset, ids: Any) -> Any:
        _sleep_if("slow-data", rank == "1")
        return original_load(data, ids)

    def slow_forward(block: TransformerBlock, *args: Any, **options: Any) -> Any:
        _sleep_if("slow-compute", rank == "2")
        return original_forward(block, *args, **options)

    TokenDataset._load_tokens, TransformerBlock.forward = slow_load, slow_forward  # type: ignore[method-assign]
    training_code.main()


def _sleep_if(file_name: str, applies: bool) -> None:
    if applies and Path(file_name).exists():
        time.sleep(0.03)
