"""Our loop: `train`, with all that it does for every run. Its data keep the pace, since a step begins with a batch."""

from __future__ import annotations

import sys

from benchmarks.loops.pace import Pace
from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Samples, Transformer, parallelize, runtime, train
from swarmtrain.trainer.data.samples import Batch


class _Paced(Samples):
    pace: Pace

    def batch(self, position: int, count: int) -> Batch:
        self.pace.step()
        return super().batch(position, count)


def main() -> None:
    config = Config.from_json(sys.argv[1])
    shape, seed = config.transformer_architecture, config.trainer.seed
    with runtime.start(config) as here:
        data = _Paced(config.data.data_prefixes, shape, seed)
        data.pace = Pace()
        model = parallelize(Transformer(shape, seed), here)
        train(here, model, Optimizer(model, config), data, None, facts={})


if __name__ == "__main__":
    main()
