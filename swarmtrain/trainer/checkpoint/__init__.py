"""Checkpoints: save and restore model and optimizer, whole or not at all, in any world's topology.

storage     tensor bytes, behind torch's distributed checkpoint
fit         whether it is of this model and this optimizer
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import swarmtrain
from swarmtrain.board import Board
from swarmtrain.config.files import reason
from swarmtrain.errors import CheckpointError, ForeignCheckpoint
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import disks, search, stage, survive
from swarmtrain.trainer.checkpoint.background import Background, Files, leave_note
from swarmtrain.trainer.checkpoint.fit import EVERYTHING, Rules, differences, listing, names_to_load, owners
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.retention import Keep
from swarmtrain.trainer.checkpoint.storage import Memory, Reader, Writer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
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

    def __init__(self, here: Runtime, model: ParallelModel, optimizer: Optimizer, data: str, note: Note) -> None:
        """Claim save_dir for this world. `data` is the training data's fingerprint; `note` is told of checkpoints that are passed
        over, and of those that cannot be written.

        Raises CheckpointError if save_dir cannot be written, or is not the same folder on all nodes.
        """
        self._here, self._model, self._optimizer, self._data, self._note = here, model, optimizer, data, note
        self.save_dir = here.config.trainer.save_dir
        self.saved: int | None = None
        """Step of the newest checkpoint that this world has begun to write, or has read."""
        self._stands: int | None = None
        self._memory = Memory(here.device)
        self._all_written = threading.Event()
        self._underway: _Underway | None = None
        self._landed: list[Saved] = []
        self._await_rescue()
        self.disk = disks.disk(here, self.save_dir, note) if self.save_dir else None
        self.token = self.disk.claim() if self.disk else 0

    def restore(self) -> tuple[Progress, Path | None]:
        """Load the newest valid checkpoint of save_dir, else of load_dir, into model and optimizer.

        Return how far it had come and where it is; a fresh Progress and None if there is none and load_dir is not set.
        Raises ForeignCheckpoint if it belongs to another model or other data, CheckpointError if load_dir has none.
        """
        if self.disk and (own := self.disk.newest(self.token)):
            progress = self._progress(*own, foreign=False)
            self._load([own], EVERYTHING)
            self.saved = self._stands = own[1].step
            return progress, own[0]
        sources = [self._source(folder) for folder in self._here.config.trainer.load_dir]
        if not sources:
            return Progress(), None
        progress = self._progress(*sources[0], foreign=True)
        self._load(sources, Rules.of(self._here.config.trainer))
        return progress, sources[0][0]

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
        return writer, writer.take(self._tensors())

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
            dcp.save(self._tensors(), storage_writer=writer)
        except CheckpointException as error:  # a BaseException, so nobody else would catch it
            raise CheckpointError(_first_reason(error), place=f"config trainer.save_dir {save_dir}") from None
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
        mesh, config = self._model.mesh, self._here.config
        content = Manifest(
            token=self.token,
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            loss_before=progress.loss_before,
            data=self._data,
            random={"seed": config.trainer.seed, "derived_from": ["seed", "step", "micro batch"]},
            topology={
                "world_size": self._here.size,
                "data_parallel_size": mesh.data_size,
                "model_parallel_size": mesh.tensor_size,
                "pipe_parallel_size": mesh.pipe_size,
            },
            files=files,
            tensors=tensors,
            config=config.model_dump(mode="json"),
            versions={"torch": torch.__version__, "swarmtrain": swarmtrain.__version__},
            held_out_loss=progress.held_out_loss,
        )
        path = stage.commit(save_dir, folder, content)
        try:
            stage.prune(save_dir, Keep.of(config.trainer), self.token)
        except OSError as error:
            LOG.warning("%s: an old checkpoint cannot be removed: %s", save_dir, reason(error))
        return path

    def _source(self, folder: Path) -> tuple[Path, Manifest]:
        found = search.in_one_folder(self._here, folder, self._note)
        if found is None:
            raise CheckpointError(
                "has no checkpoint that is whole",
                place=f"config trainer.load_dir {folder}",
                hint="is it mounted here? without trainer.load_dir the run begins anew",
            )
        return found

    def _progress(self, path: Path, content: Manifest, *, foreign: bool) -> Progress:
        if foreign and not self._here.config.trainer.load_context:
            return Progress()
        if content.data == self._data:
            return Progress(content.step, content.consumed_samples, content.loss_before, content.held_out_loss)
        if foreign:
            return Progress(content.step, 0, None)
        raise ForeignCheckpoint(
            f"was trained on other data, or in another order{self._changes(content, 'data')}",
            place=str(path),
            hint="choose another trainer.save_dir, or bring the data back",
        )

    def _changes(self, content: Manifest, section: str) -> str:
        """Return what differs between the checkpoint's config and this one, side by side."""
        here = self._here.config.model_dump(mode="json")
        return "".join(f"; {line}" for line in differences(content.config.get(section, {}), here[section], section))

    def _load(self, sources: Sequence[tuple[Path, Manifest]], rules: Rules) -> None:
        tensors, place = self._tensors(), " and ".join(str(path) for path, _ in sources)
        owner = owners([content.tensors for _, content in sources])
        found = {name: tuple(sources[number][1].tensors[name]["size"]) for name, number in owner.items()}
        # What a rank has of the whole is for torch's planner to say; what stages of a pipeline have together is asked here.
        shapes = agreement.gather({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        wanted = {name: shape for part in shapes for name, shape in part.items()}
        names = names_to_load(found, wanted, place, rules, self._changes(sources[0][1], "transformer_architecture"))
        if rules != EVERYTHING or len(sources) > 1:
            self._note(f"{place}: {listing(found, wanted, names)}")
        for number, (path, content) in enumerate(sources):
            known = {name: tensors[name] for name in names if name in tensors and owner[name] == number}
            try:
                dcp.load(known, storage_reader=Reader(path, content.tensors))
            except CheckpointException as error:  # a BaseException, so nobody else would catch it
                raise CheckpointError(_first_reason(error), place=str(path)) from None

    def _tensors(self) -> dict[str, Tensor]:
        """Return all that is saved, as whole (distributed) tensors that share memory with what trains."""
        shards = self._model.shards
        whole = {f"model/{name}": shards.whole(name, parameter.detach()) for name, parameter in self._model.parameters.items()}
        for key, tensor in self._optimizer.moments().items():
            whole[f"optimizer/{key}"] = shards.whole(key.partition("/")[2], tensor)
        return whole


def _first_reason(error: CheckpointException) -> str:
    rank, (reason, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {reason}"
