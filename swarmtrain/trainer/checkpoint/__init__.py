"""Checkpoints: save and restore model and optimizer, whole or not at all, in any world's topology.

held        what is kept: model and optimizer, or what a script of one's own has
storage     tensor bytes, behind torch's distributed checkpoint
fit         whether it is of this model and this optimizer
restore     how these are taken up again
manifest    everything else, as JSON, with hashes
stage       written aside, moved in by rename; what stands in save_dir
retention   what of that stays
background  written while training goes on
disks       one that all nodes share, or one of each node's own
search      which of those that stand is the newest that is whole
survive     written by those that are left when a world breaks
fence       one world at a time can commit
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import swarmtrain
from swarmtrain.board import Board
from swarmtrain.config.files import reason
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import disks, stage, survive
from swarmtrain.trainer.checkpoint.background import Background, Files, leave_note
from swarmtrain.trainer.checkpoint.held import Held
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.retention import Keep, Standing
from swarmtrain.trainer.checkpoint.search import Found
from swarmtrain.trainer.checkpoint.storage import Memory, Writer
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_LANDS_WITHIN = 10.0
Note = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    consumed_samples: int = 0
    loss_before: float | None = None
    """Held-out loss before the first step."""
    held_out_loss: float | None = None
    """Held-out loss after `step`, where it has been measured."""

    def measured(self, loss: float) -> Progress:
        """Return the same with the held-out `loss` at this step."""
        return replace(self, held_out_loss=loss, loss_before=loss if self.loss_before is None else self.loss_before)

    def after(self, step: int, consumed_samples: int) -> Progress:
        """Return how far it is after another step."""
        return replace(self, step=step, consumed_samples=consumed_samples, held_out_loss=None)


@dataclass(frozen=True)
class _Underway:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    writing: Background[None]
    committing: Background[Saved] | None
    """On a rank that does so: see disks.py."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that stands."""

    step: int
    path: Path
    seconds: float
    """From when it was due until it stood."""
    stood: float
    """Seconds of these in which training stood still."""


class Checkpoints:
    """The checkpoints of one run, as one world sees them. All methods are called by all ranks together."""

    def __init__(self, here: Runtime, held: Held, data: str, note: Note) -> None:
        """Claim save_dir for this world. `data` is the training data's fingerprint; `note` is told of checkpoints that are passed
        over, and of those that cannot be written.

        Raises CheckpointError if save_dir cannot be written, or is not the same folder on all nodes.
        """
        self._here, self._held, self._data, self._note = here, held, data, note
        self.save_dir = here.config.trainer.save_dir
        self.saved: int | None = None
        """Step of the newest checkpoint that this world has begun to write, or has read."""
        self._stands: int | None = None
        self._memory = Memory(here.device)
        self._all_written = threading.Event()
        self._underway: _Underway | None = None
        self._landed: list[Saved] = []
        self._known: dict[Path, Standing] = {}
        """What the checkpoints in save_dir are: no other world commits there while this one may."""
        self._await_rescue()
        self.disk = disks.disk(here, self.save_dir, note) if self.save_dir else None
        self.token = self.disk.claim() if self.disk else 0

    def newest(self) -> Found | None:
        """Return the newest valid checkpoint of save_dir, None if there is none. Raises CheckpointError."""
        found = self.disk.newest(self.token) if self.disk else None
        if found:
            self.saved = self._stands = found[1].step
        return found

    def save(self, progress: Progress) -> None:
        """Begin to write a checkpoint into save_dir, which must be set; wait for the end of the one before, and of this one
        unless trainer.save_in_background is set.

        One that cannot be written is told and given up: training can go on, and the next one may succeed.
        Raises WorldError if a newer world has taken over.
        """
        self._settle()
        try:
            self._begin(progress)
        except CheckpointError as error:
            self._give_up(progress.step, None, error)
        if not self._here.config.trainer.save_in_background:
            self._settle()

    def stand(self, progress: Progress) -> None:
        """Return when the checkpoint of `progress` stands, at the end of a run or of a world.

        Raises CheckpointError if it cannot be written, WorldError if a newer world has taken over.
        """
        self._settle()
        if self.save_dir is not None and self.saved != progress.step:
            self._wait(self._begin(progress))

    def take(self, folder: Path, part: int) -> tuple[Writer, dict[str, Any]]:
        """Copy what this rank holds into memory; return what writes it into `folder` as `part`, and its index. Needs no other rank."""
        if self._underway:
            self._underway.writing.end()  # it writes from that memory, and counts if the others could write too
        writer = Writer(folder, part, self._memory)
        return writer, writer.take(self._held.tensors())

    def let_land(self) -> None:
        """Return when what is being written stands, or after some seconds: an error ends this rank. Needs no other rank."""
        if underway := self._underway:
            underway.writing.end(_LANDS_WITHIN)
            if underway.committing:
                underway.committing.end(_LANDS_WITHIN)

    def landed(self) -> list[Saved]:
        """Return the checkpoints that have come to stand since this was last asked, as far as this rank has to do with it. Rank 0 has."""
        committing = self._underway.committing if self._underway else None
        if committing and committing.ended and not committing.failed:
            self._finish()
        landed, self._landed = self._landed, []
        return landed

    def _begin(self, progress: Progress) -> _Underway:
        """Copy what is to be saved, and begin to write it. Raises CheckpointError, WorldError."""
        save_dir, disk = self.save_dir, self.disk
        if save_dir is None or disk is None:
            raise ValueError("a checkpoint without trainer.save_dir")
        begun, background = time.monotonic(), self._here.config.trainer.save_in_background
        folder = disk.begin(progress.step, self.token)
        writer = disk.writer(folder, self._memory)
        try:
            dcp.save(self._held.tensors(), storage_writer=writer)
        except CheckpointException as error:  # a BaseException, so nobody else would catch it
            raise CheckpointError(first_reason(error), place=f"config trainer.save_dir {save_dir}") from None
        disk.divide(writer)
        stood = time.monotonic() - begun

        def write() -> None:
            leave_note(folder, self._here.rank, writer.write())

        def commit() -> Saved:
            path = disk.commit(folder, self._all_written, lambda files: self.commit(save_dir, folder, progress, files, writer.tensors))
            seconds = time.monotonic() - begun
            return Saved(progress.step, path, seconds, stood if background else seconds)

        self._all_written.clear()
        writing = Background(lambda: stage.told(save_dir, write))
        committing = Background(commit) if disk.keeps else None
        self._underway = _Underway(progress.step, folder, writing, committing)
        self.saved = progress.step
        return self._underway

    def _wait(self, underway: _Underway) -> None:
        """Return when `underway` stands. Raises CheckpointError, WorldError."""
        # First each its own part: a rank that has died shows here, and would be waited for in vain behind the other call.
        agreement.by_every_rank(underway.writing.result)
        self._all_written.set()
        agreement.by_every_rank(self._finish)
        self._stands, self._underway = underway.step, None

    def _settle(self) -> None:
        """Return when nothing is being written any more; of what cannot be written nothing stays. Raises WorldError."""
        if underway := self._underway:
            try:
                self._wait(underway)
            except CheckpointError as error:
                self._give_up(underway.step, underway, error)

    def _give_up(self, step: int, underway: _Underway | None, error: CheckpointError) -> None:
        """Tell why the checkpoint of `step` is not to be. All ranks have met the same `error`, and none writes any more."""
        self.saved, self._underway = self._stands, None
        if underway and underway.committing:
            stage.give_up(underway.folder)
            self._all_written.set()  # who waits for parts finds no folder, or no patience
            underway.committing.end()
        who = f"rank {error.rank}: " if error.rank is not None else ""
        newest = "there is none yet" if self._stands is None else f"the newest is of step {self._stands}"
        self._note(f"no checkpoint of step {step}: {who}{error}; training goes on, {newest}")

    def _finish(self) -> None:
        """Take note that what this rank has been committing stands. Raises what committing raised."""
        underway = self._underway
        if underway and underway.committing:
            self._landed.append(underway.committing.result())
            self._underway = replace(underway, committing=None)

    def _await_rescue(self) -> None:
        """Survivors of the last world may be saving still: to claim the folder now would be to lose what they hold."""
        if self._here.first and self._here.board and self.save_dir:
            survive.await_rescue(Board(self._here.board))

    def commit(self, save_dir: Path, folder: Path, progress: Progress, files: Files, tensors: dict[str, Any]) -> Path:
        """Turn `folder`, which holds `files` and in them `tensors`, into the checkpoint of a step. Called by one rank.

        Raises WorldError if a newer world has taken over, CheckpointError if a file is not there, OSError.
        """
        config = self._here.config
        content = Manifest(
            token=self.token,
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            loss_before=progress.loss_before,
            data=self._data,
            random={"seed": config.trainer.seed, "derived_from": ["seed", "step", "micro batch"]},
            topology={"world_size": self._here.size, **self._held.topology},
            files=files,
            tensors=tensors,
            config=config.model_dump(mode="json"),
            versions={"torch": torch.__version__, "swarmtrain": swarmtrain.__version__},
            held_out_loss=progress.held_out_loss,
            state=self._held.state(),
        )
        path = stage.commit(save_dir, folder, content)
        self._known.pop(path, None)
        try:
            stage.prune(save_dir, Keep.of(config.trainer), self.token, self._known)
        except OSError as error:
            LOG.warning("%s: an old checkpoint cannot be removed: %s", save_dir, reason(error))
        return path


def first_reason(error: CheckpointException) -> str:
    """Return why torch's distributed checkpoint failed, by the first rank on which it did."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {reason}"
