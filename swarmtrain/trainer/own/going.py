"""The steps of a script of one's own: where they go on, when they are saved, when ranks leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from swarmtrain.errors import ForeignCheckpoint, TrainingError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import Checkpoints, Note, Progress, Saved, search
from swarmtrain.trainer.checkpoint.rhythm import Rhythm
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.own.dealt import Dealt, can_deal
from swarmtrain.trainer.own.kept import Kept, changed
from swarmtrain.trainer.runtime import Runtime, seed

_IN_THE_LOOP = {"save_if_due": "run.save_if_due()", "asked_to_leave": "if run.asked_to_leave: run.leave()"}


class Going:
    """What a script keeps, and how far it is. All methods are called by all ranks together."""

    def __init__(self, here: Runtime, group: dist.ProcessGroup | None, kept: Kept, stop: StopFlag, note: Note) -> None:
        """Load the newest checkpoint, if there is one. Raises what Checkpoints, Kept.load and trainer.load_dir do."""
        self._here, self._group, self._kept, self._stop, self._note = here, group, kept, stop, note
        self._checkpoints = Checkpoints(here, kept, "", note)
        self._rhythm: Rhythm | None = None
        self._called: set[str] = set()
        self._agreed: tuple[int, bool, bool] | None = None
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
        return self._together()[0]

    def save_if_due(self, held_out_loss: float | None) -> list[Saved]:
        """Begin a checkpoint of this step if one is due; return those that have come to stand. Raises WorldError."""
        self._called.add("save_if_due")
        if held_out_loss is not None:
            self.progress = self.progress.measured(held_out_loss)
        rhythm, progress = self._rhythm, self.progress
        if rhythm is None:
            raise TrainingError("save_if_due() outside of the loop over run.steps()", place="save_if_due", hint="it knows what a step is")
        due = self._together()[1] or rhythm.due(progress.step, progress.consumed_samples, measured=held_out_loss is not None)
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

    def _together(self) -> tuple[bool, bool]:
        """Return whether any rank is to leave, and whether rank 0's clock wishes for a checkpoint; asked once a step."""
        if self._agreed is None or self._agreed[0] != self.progress.step:
            wished = self._here.first and self._rhythm is not None and self._rhythm.wished
            leaves, wishes = agreement.totals([self._stop.raised, wished], self._group)
            self._agreed = self.progress.step, leaves > 0, wishes > 0
        return self._agreed[1:]

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
        self._begin({"batch": 1, "ranks": self._here.size}, 0, last)
        done, seen = self.progress.step, 0
        for self.epoch in range(epochs or (1 if last is None else 1 << 62)):
            before = seen
            for given in data:
                seen += 1
                if not self._is_left():
                    return
                if seen > done:
                    yield given
            if seen == before:
                raise TrainingError(
                    "the data is at its end", place="steps", hint="an iterator can be read once: give what can be iterated anew"
                )

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
