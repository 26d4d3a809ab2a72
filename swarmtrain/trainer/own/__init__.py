"""A training script of one's own: five lines make it one that goes on after whatever befalls it, and two take its numbers.

    with swarmtrain.trainer.run(trainer={"save_dir": "checkpoints"}) as run:
        run.keep(model=model, optimizer=optimizer)
        for batch in run.steps(loader, epochs=10):
            ...
            run.log(loss=loss, tokens=run.sum(tokens))
            run.save_if_due()
            if run.asked_to_leave:
                run.leave()

Under any launcher, under plain torchrun, srun or mpirun, and alone. run.log() needs none of the others.

kept        what is saved: anything with a state_dict()
dealt       a DataLoader's samples, dealt out to the ranks there are
reading     other data, of which each rank reads its own
going       steps: where they go on, when they are saved
moments     functions that are called when something happens
made        objects from a config
rates       learning rates for larger batches
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from pydantic import ValidationError

from swarmtrain import wire
from swarmtrain.config import Config
from swarmtrain.config.explain import explain
from swarmtrain.errors import ConfigError, TrainingError
from swarmtrain.trainer import agreement, runtime
from swarmtrain.trainer.checkpoint import Saved
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.metrics.board import Poster
from swarmtrain.trainer.metrics.reduced import How, Named, Reduced, taken, together
from swarmtrain.trainer.metrics.sinks import Sinks, folder_of
from swarmtrain.trainer.metrics.sinks.lines import last_step
from swarmtrain.trainer.own.going import Going
from swarmtrain.trainer.own.kept import Kept, Stateful
from swarmtrain.trainer.own.made import make
from swarmtrain.trainer.own.moments import Moment, Moments
from swarmtrain.trainer.own.rates import ramp
from swarmtrain.trainer.runtime import Runtime

__all__ = ["Run", "make", "ramp", "run"]

LOG = logging.getLogger("swarmtrain")
_FLUSH = 10.0


@contextmanager
def run(
    config: Config | Path | str | None = None, *, trainer: Mapping[str, Any] | None = None, logger: Mapping[str, Any] | None = None
) -> Iterator[Run]:
    """Join the world, unless the script has, and take its numbers. At the end of the body all are written, and what is kept is saved.

    `config`: a config, or the path of one, where no launcher has left its own; without either, all is as the config's
    defaults have it. `trainer` and `logger` change fields of these sections: `run(logger={"log_dir": "logs", "use_csv": True})`.
    Raises ConfigError if the config is wrong, TrainingError if the world cannot be joined.
    """
    with ExitStack() as stack:
        joined = dist.is_initialized()
        here = stack.enter_context(runtime.start(_config(config, {"trainer": trainer or {}, "logger": logger or {}})))
        # The script's own group may be for GPUs alone; what is exchanged here is small, and on the CPU.
        made = Run(here, dist.new_group(backend="gloo") if joined else None, stack)
        with made.moments:
            try:
                yield made
                made._finish()
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
        self._going: Going | None = None
        self.moments = Moments()

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
        """The step that the loop over steps() is at; without one the last that is logged, over restarts too; 0 if none is.

        Without keep(), set it before the first log() to the step of the checkpoint that the script goes on from: what was logged of later
        ones is forgotten.
        """
        return self._going.progress.step if self._going else self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._told = step, True

    @property
    def asked_to_leave(self) -> bool:
        """Whether any rank has been asked to leave (SIGTERM). Ask on all ranks together, once a step.

        From the first time on the signal does nothing else: save, and leave with sys.exit(75) to be started again.
        """
        stop = self._stop_flag()
        return self._going.asked_to_leave if self._going else agreement.totals([stop.raised], self._group)[0] > 0

    @property
    def epoch(self) -> int:
        """How often the data of steps() has been read to its end."""
        return self._going.epoch if self._going else 0

    @property
    def weight(self) -> float:
        """What this rank's share of the batch weighs: 1, but where ranks have unequal shares. 0: it is there to keep ranks together.

        A loss that is a mean over the rank's samples, times this, makes DistributedDataParallel's mean over ranks that over all samples.
        """
        return self._going.weight if self._going else 1.0

    def keep(self, **objects: Stateful) -> None:
        """Save these in checkpoints, and load the newest one into them, if there is one. Call it on all ranks, once, before the loop.

        Each has a state_dict() and a load_state_dict(), which are the same on all ranks: a model, also in DistributedDataParallel,
        an optimizer, a schedule, an object of your own. What has changed in config, arguments and script since is told.
        Raises TrainingError if trainer.save_dir is not set or an object cannot be kept, ForeignCheckpoint if the newest is of others.
        """
        if self._going:
            raise TrainingError("a second call of keep()", place="keep", hint="name all that is to be kept in one")
        if self.here.config.trainer.save_dir is None:
            hint = 'run(trainer={"save_dir": "checkpoints"}), or trainer.save_dir in the config'
            raise TrainingError("there is no folder to keep it in", place="config trainer.save_dir", hint=hint)
        self._going = going = Going(self.here, self._group, Kept(objects), self._stop_flag(), self._note)
        self.step = going.progress.step
        if going.resumed:
            self._tell(f"goes on after step {self.step}, from {going.resumed[0]}", wire.RESUMED, step=self.step, path=str(going.resumed[0]))

    def steps(self, data: Iterable[Any], *, epochs: int | None = None, steps: int | None = None, batch: int | None = None) -> Iterator[Any]:
        """Yield the batches of `data` that are left to train on, from where the newest checkpoint stands. Call it on all ranks.

        Of a DataLoader each step's samples are dealt out to the ranks there are, in an order that is the same in every world;
        `batch` says how many they are, for all ranks together: batch_size times the ranks of the first world, if it is not given.
        Anything else that can be iterated is read on each rank, and what was seen is passed over; where ranks have unequally many batches,
        who has none left sees its last one again, at a `weight` of 0, until none has any. It ends after `epochs` (1) or,
        if given, `steps` in all, counted over restarts. Random numbers are seeded anew for each step. The last step is saved.
        Raises TrainingError if keep() was not called, or the loop calls neither save_if_due() nor asked_to_leave.
        """
        if self._going is None:
            hint = "run.keep(model=model, optimizer=optimizer) before the loop; without it a restart begins anew"
            raise TrainingError("nothing is kept", place="steps", hint=hint)
        for given in self._going.steps(data, epochs, steps, batch):
            yield given
            self.moments.call(Moment.step, self._going.progress.step)
        self._saved(self._going.stand())

    def save_if_due(self, *, measured: float | None = None) -> None:
        """Save this step, if a checkpoint is due by trainer.save_interval, while training goes on. Call it at the end of each step.

        `measured`: what the model is worth at this step, where that has been found out, the same on all ranks: a held-out loss, or with
        trainer.best_checkpoints_are highest, an accuracy. trainer.keep_best_checkpoints keeps the best.
        Raises WorldError if a newer world has taken over, TrainingError outside of the loop.
        """
        if self._going is None:
            raise TrainingError("nothing is kept", place="save_if_due", hint="run.keep(model=model, optimizer=optimizer) before the loop")
        self._saved(self._going.save_if_due(measured))

    def leave(self) -> NoReturn:
        """Save this step and end this rank as planned: it is started again. Raises CheckpointError, WorldError, SystemExit."""
        if self._going:
            self._saved(self._going.stand())
        LOG.info("asked to leave: stops after step %d", self._step)
        raise SystemExit(wire.EXIT_PLANNED)

    def at(self, moment: Moment | str, function: Callable[..., object], *, priority: int = 0) -> None:
        """Call `function` at a `moment`: "step", with its number; "saved", with step and path; "end", whatever it is that ends the run.

        Those with a higher `priority` come first. One that fails ends the run, but at the end the others are called all the same.
        """
        self.moments.add(Moment(moment), function, priority)

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Log `values` of `step`; without it, of the step after the last one. Call it on all ranks, once a step.

        A value is a number, a tensor of one number, which stays on its device until a line is due, or an object that has a
        `compute()`, as those of torchmetrics. What is written is the mean over ranks, or what run.sum(value), run.min, run.max,
        run.last and run.cat make of it. Ranks talk to each other once in logger.log_interval steps.
        Raises TrainingError for a value that is no number, or if a place that the config names cannot be written.
        """
        current = self._going.progress.step if self._going else 0
        number = (current or self._step + 1) if step is None else step
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

    def _stop_flag(self) -> StopFlag:
        if self._stop is None:
            self._stop = self._stack.enter_context(StopFlag())
        return self._stop

    def _finish(self) -> None:
        """The body has come to its end."""
        if going := self._going:
            self._saved(going.stand())
            if going.is_done:
                self._tell(f"finished at step {going.progress.step}", wire.FINISHED, step=going.progress.step)

    def _saved(self, landed: Sequence[Saved]) -> None:
        for saved in landed:
            told = f"saved {saved.path} in {saved.seconds:.2f} s; training stood still for {saved.stood:.2f} s"
            self._tell(told, wire.CHECKPOINT, step=saved.step, path=str(saved.path), seconds=round(saved.seconds, 3))
            self.moments.call(Moment.saved, saved.step, saved.path)

    def _note(self, message: str) -> None:
        if self.here.first:
            LOG.warning("%s", message)
            if self._poster:
                self._poster.post(wire.Event(wire.NOTE, {"node": self.here.node, "message": message}))

    def _tell(self, message: str, kind: str, **data: Any) -> None:
        """Say something that has happened. Rank 0 does."""
        if self.here.first:
            LOG.info("%s", message)
            if self._poster:
                self._poster.post(wire.Event(kind, data))

    def _end(self, *, all_are_here: bool) -> None:
        if all_are_here:
            self._flush()
        self._sinks.close()
        if self._poster:
            self._poster.close(_FLUSH)


def _said(line: Mapping[str, Any]) -> str:
    told = (f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items())
    return "  ".join(told)


def _config(given: Config | Path | str | None, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    if isinstance(given, Config):
        config = given
    elif given is not None or "SWARMTRAIN_CONFIG" in os.environ:
        config = runtime.read_config([] if given is None else [str(given)])
    else:
        config = Config()
    values = json.loads(config.to_json())
    for section, fields in changes.items():
        values[section] |= fields
    try:
        return Config.from_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ConfigError(tuple(explain(error, Config, {}))) from None
