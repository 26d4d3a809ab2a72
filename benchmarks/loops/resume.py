"""Save a checkpoint of a new model, load it as a run does that resumes, or only read its files, and print the seconds that this takes."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Transformer, parallelize, start_runtime
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.restore import restore_training_state
from swarmtrain.trainer.checkpoint.training_state import TrainingState

_BLOCK_BYTES = 1 << 24


def main() -> None:
    config, action = Config.from_json(sys.argv[1]), sys.argv[2]
    with start_runtime(config) as runtime:
        started_at = time.perf_counter()
        if action == "read":
            _read_files(Path(str(config.trainer.save_dir)))
            sys.stdout.write(f"{time.perf_counter() - started_at}\n")
            return
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), runtime, initialize=action == "save")
        state = TrainingState(model, Optimizer(model, config))
        manager = CheckpointManager(runtime, state, "benchmark", _raise_error)
        if action == "save":
            manager.save_and_wait(Progress(step=1))
        else:
            progress, _ = restore_training_state(runtime, manager, state, "benchmark", _raise_error)
            if progress.step != 1:
                raise RuntimeError("the checkpoint was not loaded")
        sys.stdout.write(f"{time.perf_counter() - started_at}\n")


def _read_files(save_dir: Path) -> None:
    files = sorted(save_dir.glob("step-*/part-*"))
    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(_read_file, files))


def _read_file(path: Path) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _raise_error(message: str) -> None:
    raise RuntimeError(message)


if __name__ == "__main__":
    main()
