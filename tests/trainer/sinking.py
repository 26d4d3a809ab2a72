"""Tells the sinks of a run what it is told to, and dies or ends."""

from __future__ import annotations

import os
import signal
import sys

import trial
from pydantic import BaseModel

from swarmtrain.trainer import runtime
from swarmtrain.trainer.determined import Trial
from swarmtrain.trainer.metrics.sinks import Sinks


class Options(BaseModel):
    """After which step it goes on, what it tells, and whether it is killed then."""

    after: int
    lines: list[dict[str, float | list[int] | None]]
    dies: bool


def main() -> None:
    if "DET_MASTER" in os.environ:
        trial.det._info._info = trial.cluster()
    config = runtime.read_config(sys.argv[1:])
    options = runtime.read_options(Options, config)
    with runtime.start(config) as here:
        master = Trial(here)
        sinks = Sinks(master)
        sinks.open(here, options.after)
        for line in options.lines:
            sinks.write({**line, "step": int(line["step"])})
        if options.dies:
            master.close()  # it has heard all; what becomes of the rest is for the sinks to find out
            os.kill(os.getpid(), signal.SIGKILL)
        sinks.close()
