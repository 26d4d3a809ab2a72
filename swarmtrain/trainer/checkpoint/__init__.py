"""Checkpoints: save and restore model and optimizer, completely or not at all, in the topology of any world.

state               what is saved: model and optimizer, or the state of a custom script
tensor_storage      tensor bytes, behind torch's distributed checkpoint
compatibility       whether a checkpoint belongs to this model and this optimizer
restore             loading model and optimizer state
manifest            everything else, as JSON, with digests
commit              written to a staging folder, committed by rename; the checkpoints of save_dir
retention           which of them are kept
background_task     writing while training continues
storage_backend     a disk that all nodes share, or one per node
discovery           the newest complete checkpoint
just_in_time        written by the surviving ranks when a world breaks
fence               only one world at a time can commit
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
from swarmtrain.config.files import describe_os_error
from swarmtrain.coordinator_client import CoordinatorClient
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import commit, just_in_time, storage_backend
from swarmtrain.trainer.checkpoint.background_task import BackgroundTask, FileDigests, write_completion_marker
from swarmtrain.trainer.checkpoint.discovery import FoundCheckpoint
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.retention import CheckpointInfo, RetentionPolicy
from swarmtrain.trainer.checkpoint.state import CheckpointState
from swarmtrain.trainer.checkpoint.tensor_storage import StagingBuffer, TensorStorageWriter
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_DRAIN_TIMEOUT_SECONDS = 10.0
WarningReporter = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """The training progress of a run."""

    step: int = 0
    consumed_samples: int = 0
    initial_validation_loss: float | None = None
    """Validation loss before the first step."""
    validation_loss: float | None = None
    """Validation loss after `step`, if it was evaluated."""

    def with_validation_loss(self, loss: float) -> Progress:
        """Return the same progress with validation loss `loss` at this step."""
        return replace(
            self,
            validation_loss=loss,
            initial_validation_loss=loss if self.initial_validation_loss is None else self.initial_validation_loss,
        )

    def advance_to(self, step: int, consumed_samples: int) -> Progress:
        """Return the progress after another step."""
        return replace(self, step=step, consumed_samples=consumed_samples, validation_loss=None)


@dataclass(frozen=True)
class _PendingSave:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    write_task: BackgroundTask[None]
    commit_task: BackgroundTask[SavedCheckpoint] | None
    """Set on ranks that commit: see storage_backend.py."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    step: int
    path: Path
    save_seconds: float
    """From the start of the save to the commit."""
    stall_seconds: float
    """Seconds of these during which training was stalled."""


class CheckpointManager:
    """The checkpoints of one run, as seen by one world. All methods are called by all ranks together, unless they say otherwise."""

    def __init__(self, runtime: Runtime, state: CheckpointState, data_fingerprint: str, report_warning: WarningReporter) -> None:
        """Claim save_dir for this world.

        `data_fingerprint` is that of the training data. `report_warning` is called for checkpoints that are skipped, and for those that
        cannot be written.
        Raises CheckpointError if save_dir cannot be written, or is not the same folder on all nodes.
        """
        self._runtime, self._state, self._data_fingerprint, self._report_warning = runtime, state, data_fingerprint, report_warning
        self.save_dir = runtime.config.trainer.save_dir
        self.latest_step: int | None = None
        """Step of the newest checkpoint that this world has started to write, or has loaded."""
        self._committed_step: int | None = None
        self._staging_buffer = StagingBuffer(runtime.device)
        self._all_written = threading.Event()
        self._pending_save: _PendingSave | None = None
        self._completed_saves: list[SavedCheckpoint] = []
        self._known_checkpoints: dict[Path, CheckpointInfo] = {}
        """Metadata of the checkpoints in save_dir, cached: no other world commits there while this one may."""
        self._await_rescue()
        self.storage = storage_backend.build_storage_backend(runtime, self.save_dir, report_warning) if self.save_dir else None
        self.generation = self.storage.claim_generation() if self.storage else 0

    def find_newest(self) -> FoundCheckpoint | None:
        """Return the newest valid checkpoint of save_dir, None if there is none. Raises CheckpointError."""
        checkpoint = self.storage.find_newest(self.generation) if self.storage else None
        if checkpoint:
            self.latest_step = self._committed_step = checkpoint[1].step
        return checkpoint

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint into save_dir, which must be set.

        Waits for the previous checkpoint first, and for this one unless trainer.save_in_background is set. If a checkpoint cannot be
        written, it is reported and abandoned: training can continue, and the next one may succeed.
        Raises WorldError if a newer world has taken over.
        """
        self._finish_pending_save()
        try:
            self._start_save(progress)
        except CheckpointError as error:
            self._abandon_save(progress.step, None, error)
        if not self._runtime.config.trainer.save_in_background:
            self._finish_pending_save()

    def save_and_wait(self, progress: Progress) -> None:
        """Return when the checkpoint of `progress` is committed, at the end of a run or of a world.

        Raises CheckpointError if it cannot be written, WorldError if a newer world has taken over.
        """
        self._finish_pending_save()
        if self.save_dir is not None and self.latest_step != progress.step:
            self._wait_for_commit(self._start_save(progress))

    def stage_local_part(self, folder: Path, part: int) -> tuple[TensorStorageWriter, dict[str, Any]]:
        """Copy this rank's tensors into memory; return the writer that writes them into `folder` as `part`, and their index. Not
        collective.
        """
        if self._pending_save:
            self._pending_save.write_task.wait_until_done()  # it uses the same buffer, and is valid if all ranks could write
        writer = TensorStorageWriter(folder, part, self._staging_buffer)
        return writer, writer.stage_local_tensors(self._state.collect_tensors())

    def wait_for_pending_save(self) -> None:
        """Return when the pending checkpoint is committed, or after some seconds: an error is about to end this rank. Not collective."""
        if pending_save := self._pending_save:
            pending_save.write_task.wait_until_done(_DRAIN_TIMEOUT_SECONDS)
            if pending_save.commit_task:
                pending_save.commit_task.wait_until_done(_DRAIN_TIMEOUT_SECONDS)

    def take_completed_saves(self) -> list[SavedCheckpoint]:
        """Return the checkpoints committed since the last call, as far as this rank commits them. Rank 0 always does."""
        commit_task = self._pending_save.commit_task if self._pending_save else None
        if commit_task and commit_task.is_done and not commit_task.has_failed:
            self._record_commit()
        completed, self._completed_saves = self._completed_saves, []
        return completed

    def _start_save(self, progress: Progress) -> _PendingSave:
        """Copy the state into memory, and start writing it. Raises CheckpointError, WorldError."""
        save_dir, storage = self.save_dir, self.storage
        if save_dir is None or storage is None:
            raise ValueError("a checkpoint without trainer.save_dir")
        start_time, in_background = time.monotonic(), self._runtime.config.trainer.save_in_background
        folder = storage.create_staging_folder(progress.step, self.generation)
        writer = storage.build_writer(folder, self._staging_buffer)
        try:
            dcp.save(self._state.collect_tensors(), storage_writer=writer)
        except CheckpointException as error:  # a BaseException, so no `except Exception` would catch it
            raise CheckpointError(describe_first_failure(error), place=f"config trainer.save_dir {save_dir}") from None
        storage.assign_parts(writer)
        stall_seconds = time.monotonic() - start_time

        def write_part() -> None:
            write_completion_marker(folder, self._runtime.rank, writer.write())

        def commit_when_written() -> SavedCheckpoint:
            path = storage.commit_checkpoint(
                folder, self._all_written, lambda files: self.commit_checkpoint(save_dir, folder, progress, files, writer.tensor_index)
            )
            save_seconds = time.monotonic() - start_time
            return SavedCheckpoint(progress.step, path, save_seconds, stall_seconds if in_background else save_seconds)

        self._all_written.clear()
        write_task = BackgroundTask(lambda: commit.run_translating_os_errors(save_dir, write_part))
        commit_task = BackgroundTask(commit_when_written) if storage.is_leader else None
        self._pending_save = _PendingSave(progress.step, folder, write_task, commit_task)
        self.latest_step = progress.step
        return self._pending_save

    def _wait_for_commit(self, pending_save: _PendingSave) -> None:
        """Return when `pending_save` is committed. Raises CheckpointError, WorldError."""
        # Each rank's own part first: a dead rank is detected here, while the commit below would wait for it in vain.
        collectives.run_on_all_ranks(pending_save.write_task.result)
        self._all_written.set()
        collectives.run_on_all_ranks(self._record_commit)
        self._committed_step, self._pending_save = pending_save.step, None

    def _finish_pending_save(self) -> None:
        """Return when no checkpoint is being written; one that cannot be written is removed. Raises WorldError."""
        if pending_save := self._pending_save:
            try:
                self._wait_for_commit(pending_save)
            except CheckpointError as error:
                self._abandon_save(pending_save.step, pending_save, error)

    def _abandon_save(self, step: int, pending_save: _PendingSave | None, error: CheckpointError) -> None:
        """Report why there is no checkpoint of `step`. All ranks have raised the same `error`, and none is still writing."""
        self.latest_step, self._pending_save = self._committed_step, None
        if pending_save and pending_save.commit_task:
            commit.discard_staging_folder(pending_save.folder)
            self._all_written.set()  # a task that waits for parts fails: the folder is gone, or its deadline passes
            pending_save.commit_task.wait_until_done()
        rank_prefix = f"rank {error.rank}: " if error.rank is not None else ""
        newest_text = "there is none yet" if self._committed_step is None else f"the newest is of step {self._committed_step}"
        self._report_warning(f"no checkpoint of step {step}: {rank_prefix}{error}; training continues, {newest_text}")

    def _record_commit(self) -> None:
        """Record that this rank's commit is done. Raises what committing raised."""
        pending_save = self._pending_save
        if pending_save and pending_save.commit_task:
            self._completed_saves.append(pending_save.commit_task.result())
            self._pending_save = replace(pending_save, commit_task=None)

    def _await_rescue(self) -> None:
        """Wait until surviving ranks of the last world have saved: claiming the folder now would lose their state."""
        if self._runtime.is_rank_zero and self._runtime.coordinator_address and self.save_dir:
            just_in_time.await_rescue(CoordinatorClient(self._runtime.coordinator_address))

    def commit_checkpoint(
        self, save_dir: Path, staging_folder: Path, progress: Progress, files: FileDigests, tensors: dict[str, Any]
    ) -> Path:
        """Turn `staging_folder`, which holds `files` with `tensors` in them, into the checkpoint of a step. Called by one rank.

        Raises WorldError if a newer world has taken over, CheckpointError if a file is missing, OSError.
        """
        config = self._runtime.config
        manifest = Manifest(
            generation=self.generation,
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            initial_validation_loss=progress.initial_validation_loss,
            data_fingerprint=self._data_fingerprint,
            rng={"seed": config.trainer.seed, "derived_from": ["seed", "step", "micro batch"]},
            topology={"world_size": self._runtime.world_size, **self._state.topology},
            files=files,
            tensors=tensors,
            config=config.model_dump(mode="json"),
            versions={"torch": torch.__version__, "swarmtrain": swarmtrain.__version__},
            validation_loss=progress.validation_loss,
            state=self._state.collect_non_tensor_state(),
        )
        path = commit.commit_checkpoint(save_dir, staging_folder, manifest)
        self._known_checkpoints.pop(path, None)
        try:
            commit.prune_checkpoints(save_dir, RetentionPolicy.from_config(config.trainer), self.generation, self._known_checkpoints)
        except OSError as error:
            LOG.warning("%s: an old checkpoint cannot be removed: %s", save_dir, describe_os_error(error))
        return path


def describe_first_failure(error: CheckpointException) -> str:
    """Return why torch's distributed checkpoint failed, on the first rank where it did."""
    rank, (message, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {message}"
