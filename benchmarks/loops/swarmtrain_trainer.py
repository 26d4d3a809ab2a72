"""swarmtrain's training loop: `train`, unmodified. The optimizer controls the steps, since its update ends each step."""

from __future__ import annotations

import sys

from benchmarks.loops.step_control import StepControl
from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, TokenDataset, Transformer, parallelize, start_runtime, train_model
from swarmtrain.trainer.optim import OptimizerUpdate


class _ControlledOptimizer(Optimizer):
    step_control: StepControl

    def step(self, number: int) -> OptimizerUpdate:
        update = super().step(number)
        self.step_control.step()
        return update


def main() -> None:
    config = Config.from_json(sys.argv[1])
    architecture, seed = config.transformer_architecture, config.trainer.seed
    with start_runtime(config) as runtime:
        model = parallelize(Transformer(architecture, seed), runtime)
        optimizer = _ControlledOptimizer(model, config)
        optimizer.step_control = StepControl()
        train_model(runtime, model, optimizer, TokenDataset(config.data.data_prefixes, architecture, seed), None, extra_metrics={})


if __name__ == "__main__":
    main()
