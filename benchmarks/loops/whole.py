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
from swarmtrain.trainer.optim import Update


class _Timed(Optimizer):
    made_at: list[float]

    def step(self, number: int) -> Update:
        update = super().step(number)
        self.made_at.append(time.process_time())
        return update


def main() -> None:
    config = Config.from_json(sys.argv[1])
    shape, seed = config.transformer_architecture, config.trainer.seed
    with runtime.start(config) as here:
        model = parallelize(Transformer(shape, seed), here)
        optimizer = _Timed(model, config)
        optimizer.made_at = []
        begun = time.process_time()
        train(here, model, optimizer, Samples(config.data.data_prefixes, shape, seed), None, facts={})
        whole = (time.process_time() - begun) / len(optimizer.made_at)
        step = statistics.median(after - before for before, after in pairwise(optimizer.made_at))
        sys.stdout.write(f"{whole} {step}\n")


if __name__ == "__main__":
    main()
