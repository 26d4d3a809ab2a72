"""A custom script without checkpoints, in which rank 1 exits before the end of the block."""

from __future__ import annotations

import sys

import swarmtrain.trainer


def main() -> None:
    with swarmtrain.trainer.run() as run:
        run.log(loss=1.0)
        if run.rank == 1:
            sys.exit(0)
