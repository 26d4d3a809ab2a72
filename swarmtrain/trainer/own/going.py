"""The steps of a script of one's own: where they go on, when they are saved, when ranks leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader

from swarmtrain.errors import ForeignCheckpoint, TrainingError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import Checkpoints, Note, Progress, Saved, search
from swarmtrain.trainer.checkpoint.rhythm import Rhythm
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.own.dealt import Dealt, can_deal
from swarmtrain.trainer.own.kept import Kept, changed
from swarmtrain.trainer.own.reading import Reading
from swarmtrain.trainer.runtime import Runtime, seed

_IN_THE_LOOP = {"save_if_due": "run.save_if_due()", "asked_to_leave": "if run.asked_to_leave: run.leave()"}


class _Agreed(NamedTuple):
    """What all ranks know together about a step."""

    step: int
    leaves: bool = False
    """Any rank has been asked to leave."""
    wishes: bool = False
    """Rank 0's clock wishes for a checkpoint."""
    ahead: int = 0
    """Ranks that have a batch for the next step."""


class Going:
    """What a script keeps, and how far it is. All methods are called by all ranks together."""

    def __init__(self, here: Runtime, group: dist.ProcessGroup | None, kept: Kept, stop: StopFlag, note: Note) -> None:
        """Load the newest checkpoint, if there is one. Raises what Checkpoints, Kept.load and trainer.load_dir do."""
        self._here, self._group, self._kept, self._stop, self._note = here, group, kept, stop, note
        self._checkpoints = Checkpoints(here, kept, "", note)
        self._rhythm: Rhythm | None = None
        self._called: set[str] = set()
        self._agreed = _Agreed(step=-1)
        self._is_ahead = False
        """Whether this rank has a batch for the next step, of data that it reads by itself."""
        self.progress = Progress()
        self.weight = 1.0
        self.epoch = 0
        self.is_done = False
        """The data has been read to the end that was asked for."""
        self._last: int | None = None
        kept.tensors()  # what cannot be saved is told before anything is trained
        self.resumed = self._checkpoints.newest()
        found = self.resumed or self._other()
        if found:
            kept.load(*found)
            for line in changed(found, here.config) if here.first else ():
                note(f"{found[0]}: {line}")
            if self.resumed or here.config.trainer.load_context:
                self.progress = Progress(found[1].step, found[1].consumed_samples)
            else:
                kept.going.clear()

    def steps(self, data: Iterable[Any], epochs: int | None, last: int | None, batch: int | None) -> Iterator[Any]:
        """Yield the batches that are left. Raises TrainingError if the loop does not do what it must, or the data cannot be dealt out."""
        if self._rhythm:
            raise TrainingError("a second loop over steps()", place="steps", hint="one loop trains; iterate over other data as it is")
        if isinstance(data, DataLoader) and can_deal(data):
            dealt = Dealt(data, self._here.rank, self._here.size, self._seed, batch or self._kept.going.get("batch"))
            batches = self._dealt(dealt, epochs, last)
        else:
            batches = self._skipped(data, epochs, last)
        for given in batches:
            number = self.progress.step + 1
            seed(self._seed, "step", number, self._here.rank)
            self.progress = self.progress.after(number, number * int(self._kept.going["batch"]))
            yield given
            if missing := [line for name, line in _IN_THE_LOOP.items() if name not in self._called]:
                hint = "both belong at the end of each step; without run.steps() neither is asked for"
                raise TrainingError(f"the loop lacks `{'` and `'.join(missing)}`", place="steps", hint=hint)
        self.is_done = True

    @property
    def asked_to_leave(self) -> bool:
        """Whether any rank has been asked to leave."""
        self._called.add("asked_to_leave")
        return self._together().leaves

    def save_if_due(self, measured: float | None) -> list[Saved]:
        """Begin a checkpoint of this step if one is due; return those that have come to stand. Raises WorldError."""
        self._called.add("save_if_due")
        if measured is not None:
            self.progress = self.progress.measured(measured)
        rhythm, progress = self._rhythm, self.progress
        if rhythm is None:
            raise TrainingError("save_if_due() outside of the loop over run.steps()", place="save_if_due", hint="it knows what a step is")
        due = self._together().wishes or rhythm.due(progress.step, progress.consumed_samples, measured=measured is not None)
        if due and self._checkpoints.saved != progress.step:
            self._checkpoints.save(progress)
            rhythm.stood(0.0)
        landed = self._checkpoints.landed()
        for saved in landed:
            rhythm.stood(saved.stood)
            rhythm.wrote(saved.seconds)
        return landed

    def stand(self) -> list[Saved]:
        """Return when this step is saved, and what has come to stand. Raises CheckpointError, WorldError."""
        if self.progress.step:
            self._checkpoints.stand(self.progress)
        return self._checkpoints.landed()

    def _together(self) -> _Agreed:
        """Return what all ranks know together; asked once a step."""
        if self._agreed.step != self.progress.step:
            wished = self._here.first and self._rhythm is not None and self._rhythm.wished
            leaves, wishes, ahead = agreement.totals([self._stop.raised, wished, self._is_ahead], self._group)
            self._agreed = _Agreed(self.progress.step, leaves > 0, wishes > 0, int(ahead))
        return self._agreed

    def _dealt(self, dealt: Dealt, epochs: int | None, last: int | None) -> Iterator[Any]:
        going = {"batch": dealt.batch, "samples": dealt.samples, "steps of an epoch": dealt.per_epoch}
        for name, there in self._kept.going.items():
            if there != going.get(name):
                hint = "bring the data and the batch size back, or choose another trainer.save_dir"
                raise ForeignCheckpoint(f"was trained with {there} {name}, and here are {going.get(name)}", place="steps", hint=hint)
        self._begin(going, dealt.samples, dealt.per_epoch * (epochs or 1) if last is None else last)
        while self._is_left():
            for given, weight in dealt.batches(self.progress.step):
                self.weight = weight
                self.epoch = self.progress.step // dealt.per_epoch
                yield given
                if not self._is_left():
                    return

    def _skipped(self, data: Iterable[Any], epochs: int | None, last: int | None) -> Iterator[Any]:
        """What cannot be dealt out is read from the start, and what was seen is passed over."""
        there = self._kept.going.get("ranks", self._here.size)
        if there != self._here.size:
            self._note(f"{there} ranks read this data, and now there are {self._here.size}: what each of them sees is other than before")
        size = self._here.size
        self._begin({"batch": 1, "ranks": size}, 0, last)
        done = self.progress.step
        for self.epoch in range(epochs or (1 if last is None else 1 << 62)):
            reading = Reading(data, partial(seed, self._seed, "data", self._here.rank, self.epoch))
            self._check_all_have(reading)
            done -= max(agreement.gather(reading.pass_over(done), self._group))
            if done:
                continue
            (having,) = agreement.totals([reading.is_left], self._group)
            while having:
                if not self._is_left():
                    return
                given, new = reading.take()
                self.weight, self._is_ahead = size / having if new else 0.0, reading.is_left
                yield given
                having = self._together().ahead

    def _check_all_have(self, reading: Reading) -> None:
        """Raise TrainingError if the data of a rank have no batch at all."""
        having = agreement.gather(reading.is_left, self._group)
        if not any(having):
            hint = "an iterator can be read once: give what can be iterated anew; or is there nothing in it?"
            raise TrainingError("the data is at its end", place="steps", hint=hint)
        if not all(having):
            hint = "give each rank a shard that has one: run.rank of run.size are this process's numbers"
            raise TrainingError(f"rank {having.index(False)} has no batch, and others have", place="steps", hint=hint)

    def _begin(self, going: dict[str, Any], samples: int, last: int | None) -> None:
        self._kept.going = going
        self._last = last
        self._rhythm = Rhythm(self._here.config.trainer, samples, going["batch"])

    def _is_left(self) -> bool:
        return self._last is None or self.progress.step < self._last

    @property
    def _seed(self) -> int:
        return self._here.config.trainer.seed

    def _other(self) -> search.Found | None:
        for folder in self._here.config.trainer.load_dir:
            if found := search.in_one_folder(self._here, folder, self._note):
                return found
            raise TrainingError("has no checkpoint that is whole", place=f"config trainer.load_dir {folder}", hint="is it mounted here?")
        return None
