"""Our loop: `train`, with all that it does for every run. Its optimizer keeps the pace, since a step ends with it."""

from __future__ import annotations

import sys

from benchmarks.loops.pace import Pace
from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Samples, Transformer, parallelize, runtime, train
from swarmtrain.trainer.optim import Update


class _Paced(Optimizer):
    pace: Pace

    def step(self, number: int) -> Update:
        made = super().step(number)
        self.pace.step()
        return made


def main() -> None:
    config = Config.from_json(sys.argv[1])
    shape, seed = config.transformer_architecture, config.trainer.seed
    with runtime.start(config) as here:
        model = parallelize(Transformer(shape, seed), here)
        optimizer = _Paced(model, config)
        optimizer.pace = Pace()
        train(here, model, optimizer, Samples(config.data.data_prefixes, shape, seed), None, facts={})


if __name__ == "__main__":
    main()
