"""Write the given lines to the sinks of a run, and exit or be killed."""

from __future__ import annotations

import os
import signal
import sys

import determined_trial
from pydantic import BaseModel

from swarmtrain.trainer import read_config, read_options, start_runtime
from swarmtrain.trainer.metrics.sinks import Sinks
from swarmtrain.trainer.metrics.sinks.determined_trial import DeterminedTrial


class SinkOptions(BaseModel):
    """The step after which it resumes, the lines to write, and whether it is killed afterwards."""

    after: int
    lines: list[dict[str, float | list[int] | None]]
    dies: bool


def main() -> None:
    if "DET_MASTER" in os.environ:
        determined_trial.det._info._info = determined_trial.build_cluster_info()
    config = read_config(sys.argv[1:])
    options = read_options(SinkOptions, config)
    with start_runtime(config) as rank_runtime:
        master = DeterminedTrial(rank_runtime)
        sinks = Sinks(master)
        sinks.open(rank_runtime, options.after)
        for line in options.lines:
            sinks.write_metrics({**line, "step": int(line["step"])})
        if options.dies:
            master.close()  # it has received everything; what arrives elsewhere is up to the sinks
            os.kill(os.getpid(), signal.SIGKILL)
        sinks.close()
