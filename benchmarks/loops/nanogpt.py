"""nanoGPT's own train.py, unmodified, from a clone in the folder BENCH_NANOGPT.

train.py calls `numpy.memmap` for every batch. A replacement of this function waits until the next step is requested.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loops.step_control import StepControl

_EVALUATION_BATCHES = 2
"""Number of batches that train.py reads before its first step: one of each split."""


def main() -> None:
    config, folder = json.loads(sys.argv[1]), Path(os.environ["BENCH_NANOGPT"])
    shape = config["transformer_architecture"]
    data = folder / "data" / "bench"
    data.mkdir(exist_ok=True)
    for name in ("train.bin", "val.bin"):
        shutil.copyfile(f"{config['data']['data_prefixes'][0]}.bin", data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": shape["vocab_size"]}))
    values = {
        "dataset": "bench", "device": "cpu", "compile": False, "eval_interval": 1_000_000, "eval_iters": 1, "log_interval": 1,
        "out_dir": str(data), "batch_size": config["topology"]["global_batch_size"], "gradient_accumulation_steps": 1,
        "block_size": shape["sequence_length"], "n_layer": shape["num_layers"], "n_head": shape["num_attention_heads"],
        "n_embd": shape["hidden_size"], "dtype": "float32", "max_iters": 1_000_000,
    }  # fmt: skip
    _control_steps(StepControl())
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in values.items())]
    runpy.run_path("train.py", run_name="__main__")


def _control_steps(step_control: StepControl) -> None:
    original_memmap: Any = np.memmap
    seen = 0

    def memmap(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > _EVALUATION_BATCHES + 1:  # train.py reads the batch of the first step first
            step_control.step()
        return original_memmap(*arguments, **options)

    np.memmap = memmap  # type: ignore[misc, assignment]


if __name__ == "__main__":
    main()
