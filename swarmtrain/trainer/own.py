"""The numbers of a training script of one's own, to wherever those of swarmtrain's trainer go.

    with swarmtrain.trainer.run() as run:
        for batch in data:
            ...
            run.log(loss=loss, tokens=run.sum(tokens))

Under any launcher, under plain torchrun, srun or mpirun, and alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from swarmtrain import wire
from swarmtrain.config import Config
from swarmtrain.config.explain import explain
from swarmtrain.errors import ConfigError
from swarmtrain.trainer import agreement, runtime
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.metrics.board import Poster
from swarmtrain.trainer.metrics.reduced import How, Named, Reduced, taken, together
from swarmtrain.trainer.metrics.sinks import Sinks, folder_of
from swarmtrain.trainer.metrics.sinks.lines import last_step
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_FLUSH = 10.0


@contextmanager
def run(config: Config | Path | str | None = None, *, logger: Mapping[str, Any] | None = None) -> Iterator[Run]:
    """Join the world, unless the script has, and take its numbers. At the end of the body all are written.

    `config`: a config, or the path of one, where no launcher has left its own; without either, all is as the config's
    defaults have it. `logger` changes fields of its logger section: `run(logger={"log_dir": "logs", "use_csv": True})`.
    Raises ConfigError if the config is wrong, TrainingError if the world cannot be joined.
    """
    with ExitStack() as stack:
        joined = dist.is_initialized()
        here = stack.enter_context(runtime.start(_config(config, logger or {})))
        # The script's own group may be for GPUs alone; what is exchanged here is small, and on the CPU.
        made = Run(here, dist.new_group(backend="gloo") if joined else None, stack)
        try:
            yield made
        except SystemExit as leaving:
            made._end(all_are_here=leaving.code in (None, 0, wire.EXIT_PLANNED))
            raise
        except BaseException:
            made._end(all_are_here=here.size == 1)  # the others may be elsewhere, and would be waited for
            raise
        made._end(all_are_here=True)


class Run:
    """A rank's place, and what takes its numbers."""

    def __init__(self, here: Runtime, group: dist.ProcessGroup | None, stack: ExitStack) -> None:
        """Called by all ranks together; the ranks of `group` are all. What is to be undone at the end is put on `stack`."""
        self.here = here
        self._group, self._stack = group, stack
        folder = folder_of(here)
        self._step = agreement.by_every_rank(lambda: last_step(folder) if folder and here.first else 0, group)[0]
        self._stop: StopFlag | None = None
        self._pending: dict[int, Named] = {}
        self._resumed: int | None = None
        """The step that this world goes on after; None while none is logged."""
        self._told = False
        """Whether the script has said which one that is."""
        self._sinks = Sinks()
        self._is_open = False
        self._poster = Poster(here.board) if here.first and here.board else None

    @property
    def rank(self) -> int:
        """This process's number in the world."""
        return self.here.rank

    @property
    def size(self) -> int:
        """Ranks in the world."""
        return self.here.size

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.here.local_rank

    @property
    def device(self) -> torch.device:
        """Where this rank computes: its GPU, or the CPU."""
        return self.here.device

    @property
    def step(self) -> int:
        """The last step that is logged, over restarts too; 0 if none is.

        Set it before the first log() to the step of the checkpoint that the script goes on from: what was logged of later
        ones is forgotten.
        """
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._told = step, True

    @property
    def asked_to_leave(self) -> bool:
        """Whether any rank has been asked to leave (SIGTERM). Ask on all ranks together, once a step.

        From the first time on the signal does nothing else: save, and leave with sys.exit(75) to be started again.
        """
        if self._stop is None:
            self._stop = self._stack.enter_context(StopFlag())
        return agreement.totals([self._stop.raised], self._group)[0] > 0

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Log `values` of `step`; without it, of the step after the last one. Call it on all ranks, once a step.

        A value is a number, a tensor of one number, which stays on its device until a line is due, or an object that has a
        `compute()`, as those of torchmetrics. What is written is the mean over ranks, or what run.sum(value), run.min, run.max,
        run.last and run.cat make of it. Ranks talk to each other once in logger.log_interval steps.
        Raises TrainingError for a value that is no number, or if a place that the config names cannot be written.
        """
        number = self._step + 1 if step is None else step
        if self._resumed is None:
            self._resumed = self._step = self._step if self._told or number > self._step else number - 1
        self._pending.setdefault(number, {}).update(each for name, value in values.items() for each in taken(name, value))
        self._step = max(self._step, number)
        if len(self._pending) >= self.here.config.logger.log_interval:
            self._flush()

    def sum(self, value: Any) -> Reduced:
        """Return `value`, to be logged as the sum over ranks."""
        return Reduced(value, How.sum)

    def min(self, value: Any) -> Reduced:
        """Return `value`, to be logged as the least of all ranks."""
        return Reduced(value, How.min)

    def max(self, value: Any) -> Reduced:
        """Return `value`, to be logged as the greatest of all ranks."""
        return Reduced(value, How.max)

    def last(self, value: Any) -> Reduced:
        """Return `value`, to be logged as that of the last rank that has one."""
        return Reduced(value, How.last)

    def cat(self, value: Any) -> Reduced:
        """Return `value`, a number or several, to be logged as the list of those of all ranks."""
        return Reduced(value, How.cat)

    def _flush(self) -> None:
        """Write what is pending. Called by all ranks together."""
        mine = {step: {name: value.fetched() for name, value in values.items()} for step, values in self._pending.items()}
        self._pending.clear()
        everybody = agreement.gather(mine, self._group)
        if not self._is_open and self._resumed is not None:
            resumed = self._resumed
            agreement.by_every_rank(lambda: self._sinks.open(self.here, resumed), self._group)
            self._is_open = True
        line: dict[str, Any] = {}
        for step in sorted({step for of_rank in everybody for step in of_rank}):
            line = {"step": step, **together([of_rank.get(step, {}) for of_rank in everybody])}
            self._sinks.write(line)
        if line:
            LOG.info("%s", _said(line))
            self._post(line)

    def _post(self, line: Mapping[str, Any]) -> None:
        if self._poster:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            self._poster.progress(wire.Event(wire.PROGRESS, numbers))

    def _end(self, *, all_are_here: bool) -> None:
        if all_are_here:
            self._flush()
        self._sinks.close()
        if self._poster:
            self._poster.close(_FLUSH)


def _said(line: Mapping[str, Any]) -> str:
    told = (f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items())
    return "  ".join(told)


def _config(given: Config | Path | str | None, logger: Mapping[str, Any]) -> Config:
    if isinstance(given, Config):
        config = given
    elif given is not None or "SWARMTRAIN_CONFIG" in os.environ:
        config = runtime.read_config([] if given is None else [str(given)])
    else:
        config = Config()
    values = json.loads(config.to_json())
    values["logger"] |= logger
    try:
        return Config.from_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ConfigError(tuple(explain(error, Config, {}))) from None
