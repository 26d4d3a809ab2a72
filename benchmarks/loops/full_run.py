"""Measure the overhead of a complete run of `train`, relative to its steps.

Prints two numbers: CPU seconds per step of the complete run, and of the median step.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise

from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, TokenDataset, Transformer, parallelize, start_runtime, train_model
from swarmtrain.trainer.optim import OptimizerUpdate


class _TimingOptimizer(Optimizer):
    step_times: list[float]

    def step(self, number: int) -> OptimizerUpdate:
        update = super().step(number)
        self.step_times.append(time.process_time())
        return update


def main() -> None:
    config = Config.from_json(sys.argv[1])
    architecture, seed = config.transformer_architecture, config.trainer.seed
    with start_runtime(config) as runtime:
        model = parallelize(Transformer(architecture, seed), runtime, initialize=False)
        optimizer = _TimingOptimizer(model, config)
        optimizer.step_times = []
        started_at = time.process_time()
        train_model(runtime, model, optimizer, TokenDataset(config.data.data_prefixes, architecture, seed), None, extra_metrics={})
        run_seconds_per_step = (time.process_time() - started_at) / len(optimizer.step_times)
        median_step_seconds = statistics.median(after - before for before, after in pairwise(optimizer.step_times))
        sys.stdout.write(f"{run_seconds_per_step} {median_step_seconds}\n")


if __name__ == "__main__":
    main()
