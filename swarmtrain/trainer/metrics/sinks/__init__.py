"""Where a run's numbers go: metrics.jsonl, metrics.csv, TensorBoard, W&B, a trial of Determined; any of them together.

A sink takes lines, each a mapping of names to numbers with its step under `step`; or what the model made of
prompts (see texts.py). It is opened anew in each world, and no
step stands in it twice: it forgets what an earlier world has told it of the step that this one goes on after and of later
ones, and is given that step again as metrics.jsonl has it. So what a world could tell to one sink and no more to another
is in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from swarmtrain.config.logger import LoggerConfig
from swarmtrain.trainer.metrics.sinks.lines import MetricsFile
from swarmtrain.trainer.metrics.sinks.past import Past
from swarmtrain.trainer.metrics.sinks.table import Table
from swarmtrain.trainer.metrics.sinks.tensorboard import EventFile
from swarmtrain.trainer.metrics.sinks.wandb_run import WandbRun
from swarmtrain.trainer.runtime import Runtime


class Sink(Protocol):
    """Takes numbers, and samples. What becomes of where it takes them never stops training: it raises nothing once it is open."""

    def write(self, values: dict[str, Any]) -> None:
        """Take `values`, one of which is `step`. A value of None is one that is no number."""

    def close(self) -> None:
        """Bring away what is left, within half a minute."""


class Sinks:
    """All sinks of a run, as one. On ranks other than the first there are none."""

    def __init__(self, *first: Sink) -> None:
        """Begin with the sinks that are open already."""
        self._all: list[Sink] = [*first]
        self._past = Past(0, ())

    def open(self, here: Runtime, step: int) -> None:
        """Open those that the config asks for, of a run that goes on after `step`. Raises TrainingError if one cannot be opened."""
        if not here.first:
            return
        folder = folder_of(here)
        if folder:
            metrics = MetricsFile(folder, step)
            self._all.append(metrics)
            self._past = metrics.past
        for make in _asked_for(here.config.logger):
            sink = make(here, folder or Path.cwd(), self._past)
            self._all.append(sink)

    def write(self, values: dict[str, Any]) -> None:
        """Give `values` to each, but for what is known already of the step that the run goes on after."""
        if values["step"] == self._past.step:
            values = {name: value for name, value in values.items() if name == "step" or name not in self._past.names}
        if len(values) > 1:
            for sink in self._all:
                sink.write(values)

    def close(self) -> None:
        """Close all."""
        for sink in self._all:
            sink.close()


def folder_of(here: Runtime) -> Path | None:
    """Return the folder in which a run's files of numbers lie, if it has one."""
    return here.config.logger.log_dir or here.config.trainer.save_dir


def _asked_for(logger: LoggerConfig) -> Iterator[Callable[[Runtime, Path, Past], Sink]]:
    if logger.use_csv:
        yield Table
    if logger.use_tensorboard:
        yield EventFile
    if logger.use_wandb:
        yield WandbRun
