"""A whole run of ours, from the first line of `train` to the last: what it costs beside its steps.

Prints two numbers: seconds of CPU for a step of the whole run, and for the median step.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise

from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Samples, Transformer, parallelize, runtime, train
from swarmtrain.trainer.data.samples import Batch


class _Timed(Samples):
    begun: list[float]

    def batch(self, position: int, count: int) -> Batch:
        self.begun.append(time.process_time())
        return super().batch(position, count)


def main() -> None:
    config = Config.from_json(sys.argv[1])
    shape, seed = config.transformer_architecture, config.trainer.seed
    with runtime.start(config) as here:
        data = _Timed(config.data.data_prefixes, shape, seed)
        data.begun = []
        model = parallelize(Transformer(shape, seed), here)
        optimizer = Optimizer(model, config)
        begun = time.process_time()
        train(here, model, optimizer, data, None, facts={})
        whole = (time.process_time() - begun) / len(data.begun)
        step = statistics.median(after - before for before, after in pairwise(data.begun))
        sys.stdout.write(f"{whole} {step}\n")


if __name__ == "__main__":
    main()
