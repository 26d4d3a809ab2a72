"""Checkpoints of ours in the middle of training: what each takes from it.

Prints two numbers for each: seconds for which training stood still, and seconds of CPU of the process in all that was done for it.
"""

from __future__ import annotations

import sys
import time

from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Samples, Transformer, parallelize, runtime, train
from swarmtrain.trainer.checkpoint import Checkpoints, Progress


def main() -> None:
    config = Config.from_json(sys.argv[1])
    shape, seed = config.transformer_architecture, config.trainer.seed
    begin, wait = Checkpoints._begin, Checkpoints._settle

    def save(self: Checkpoints, progress: Progress) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        begin(self, progress)
        stood = time.perf_counter() - wall
        wait(self)  # so that no step is made while it is written, and all CPU time is its
        sys.stdout.write(f"{stood} {time.process_time() - cpu}\n")

    Checkpoints.save = save  # type: ignore[method-assign]
    with runtime.start(config) as here:
        model = parallelize(Transformer(shape, seed), here)
        train(here, model, Optimizer(model, config), Samples(config.data.data_prefixes, shape, seed), None, facts={})


if __name__ == "__main__":
    main()
