"""training_code.py in which the forward pass of a micro batch on rank N takes as many seconds as the file `seconds-N` says."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import training_code
from swarmtrain.trainer.health import rank_timing
from swarmtrain.trainer.model.transformer import Transformer

rank_timing.MIN_INTERVAL_SECONDS, rank_timing.MIN_INTERVAL_STEPS = 0.0, 4


def main() -> None:
    path, original_forward = Path(f"seconds-{os.environ['RANK']}"), Transformer.forward

    def slow_forward(model: Transformer, *args: Any, **options: Any) -> Any:
        end = time.monotonic() + float(path.read_text())
        output = original_forward(model, *args, **options)
        time.sleep(max(0.0, end - time.monotonic()))
        return output

    Transformer.forward = slow_forward  # type: ignore[method-assign]
    training_code.main()
