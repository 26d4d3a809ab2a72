"""Measure the cost of swarmtrain's checkpoints during training.

Prints two numbers for each checkpoint: the seconds for which training stalled, and the CPU seconds of the process for all of the
checkpoint's work.
"""

from __future__ import annotations

import sys
import time

from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, TokenDataset, Transformer, parallelize, start_runtime, train_model
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress


def main() -> None:
    config = Config.from_json(sys.argv[1])
    architecture, seed = config.transformer_architecture, config.trainer.seed
    begin_save, wait_for_save = CheckpointManager._start_save, CheckpointManager._finish_pending_save

    def save(self: CheckpointManager, progress: Progress) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        begin_save(self, progress)
        stalled_seconds = time.perf_counter() - wall
        wait_for_save(self)  # no step runs during the write, so all CPU time is the checkpoint's
        sys.stdout.write(f"{stalled_seconds} {time.process_time() - cpu}\n")

    CheckpointManager.save = save  # type: ignore[method-assign]
    with start_runtime(config) as runtime:
        model = parallelize(Transformer(architecture, seed), runtime, initialize=False)
        train_model(
            runtime, model, Optimizer(model, config), TokenDataset(config.data.data_prefixes, architecture, seed), None, extra_metrics={}
        )


if __name__ == "__main__":
    main()
