"""Checkpoints: save and restore model and optimizer atomically, with any number of ranks and in any topology.

A world is a set of ranks that train together: each restart of a run forms a new world.

training_state      what is saved: model and optimizer, or the state of a custom script
manifest            everything except tensors, as JSON, with digests of all files
storage             files on the disks: staging folders, commit, fence, and the search for the newest checkpoint
compatibility       check that a checkpoint belongs to this model and optimizer
resume_changes      what has changed since a checkpoint
restore             load model and optimizer state
consolidated        read full (unsharded) parameters, for inference, fine-tuning and export
save_interval       when a checkpoint is due
retention           which checkpoints are kept
background_task     write checkpoints while training continues
just_in_time        just-in-time checkpoint: written by the surviving ranks when a peer fails
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import swarmtrain
from swarmtrain.config import Config
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import CheckpointError
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import just_in_time
from swarmtrain.trainer.checkpoint.background_task import BackgroundTask
from swarmtrain.trainer.checkpoint.file_digests import FileDigests
from swarmtrain.trainer.checkpoint.manifest import REPRODUCIBILITY_KEY, Manifest
from swarmtrain.trainer.checkpoint.resume_changes import describe_script
from swarmtrain.trainer.checkpoint.retention import CheckpointInfo, RetentionPolicy
from swarmtrain.trainer.checkpoint.storage import commit, storage_backend
from swarmtrain.trainer.checkpoint.storage.completion_markers import write_completion_marker
from swarmtrain.trainer.checkpoint.storage.discovery import CheckpointWithManifest, WarningReporter
from swarmtrain.trainer.checkpoint.storage.tensor_reader import DamagedFiles, FileVerification
from swarmtrain.trainer.checkpoint.storage.tensor_storage import StagingBuffer, TensorStorageWriter
from swarmtrain.trainer.checkpoint.training_state import CheckpointState
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_DRAIN_TIMEOUT_SECONDS = 10.0

CheckpointLoader = Callable[[Path, Manifest, FileVerification | None], None]
"""Function that loads a checkpoint, given its path, its manifest and which files to verify. It raises DamagedFiles if they are damaged."""


@dataclass(frozen=True)
class Progress:
    """The training progress of a run, as stored in a checkpoint."""

    step: int = 0
    consumed_samples: int = 0
    initial_validation_loss: float | None = None
    """Validation loss in nats before the first step."""
    validation_loss: float | None = None
    """Validation loss in nats after `step`; None if it was not evaluated."""

    def with_validation_loss(self, loss: float) -> Progress:
        """Return this progress with validation loss `loss` at the current step."""
        return replace(
            self,
            validation_loss=loss,
            initial_validation_loss=loss if self.initial_validation_loss is None else self.initial_validation_loss,
        )

    def advance_to_step(self, step: int, consumed_samples: int) -> Progress:
        """Return the progress after step `step`. `consumed_samples`: number of samples consumed up to and including this step."""
        return replace(self, step=step, consumed_samples=consumed_samples, validation_loss=None)


@dataclass(frozen=True)
class _PendingSave:
    """A checkpoint that is being written in the background."""

    step: int
    folder: Path
    write_task: BackgroundTask[None]
    commit_task: BackgroundTask[SavedCheckpoint] | None
    """Task that commits the checkpoint; None on ranks that do not commit checkpoints (see storage/storage_backend.py)."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint: its step, its path, and the duration of its save."""

    step: int
    path: Path
    save_seconds: float
    """Seconds from the start of the save to the commit."""
    stall_seconds: float
    """Seconds for which the save stalled training."""


class CheckpointManager:
    """Saves and finds the checkpoints of a run, for one world.

    All methods are collective (every rank must call them), unless documented otherwise.
    """

    def __init__(self, runtime: Runtime, checkpoint_state: CheckpointState, data_fingerprint: str, report_warning: WarningReporter) -> None:
        """Claim save_dir for this world, so that older worlds can no longer commit checkpoints.

        `data_fingerprint`: fingerprint of the training data. `report_warning` is called with a message for each checkpoint that is
        skipped or cannot be written. Raises CheckpointError if save_dir cannot be written, or is not the same folder on all nodes.
        """
        self._runtime, self._state, self._data_fingerprint, self._report_warning = (
            runtime,
            checkpoint_state,
            data_fingerprint,
            report_warning,
        )
        self._script = describe_script()
        self.save_dir = runtime.config.trainer.save_dir
        self.run_id = runtime.run_id
        """Id of the run, for its checkpoints: that of the checkpoint from which it resumes. Empty if it is unknown."""
        self.latest_step: int | None = None
        """Step of the newest checkpoint that this world has loaded or started to write; None before that."""
        self._committed_step: int | None = None
        self._staging_buffer = StagingBuffer(runtime.device)
        self._all_written = threading.Event()
        self._pending_save: _PendingSave | None = None
        self._completed_saves: list[SavedCheckpoint] = []
        self._known_checkpoints: dict[Path, CheckpointInfo] = {}
        """Cache of the metadata of checkpoints in save_dir.

        It stays valid: as long as this world can commit checkpoints to save_dir, no other world can.
        """
        self._wait_for_just_in_time_checkpoint()
        self.storage = storage_backend.build_storage_backend(runtime, self.save_dir, report_warning) if self.save_dir else None
        self.generation = self.storage.claim_generation() if self.storage else 0

    def load_newest_checkpoint(self, load: CheckpointLoader, *, verify_first: bool = False) -> CheckpointWithManifest | None:
        """Load the newest valid checkpoint in save_dir with `load`, and return its path and manifest; None if there is none.

        A checkpoint is verified while it is loaded. If it is damaged, what `load` has changed is invalid, and the newest checkpoint without
        damage is loaded; if there is none, the caller has to restore what has changed. `verify_first`: verify before anything changes.

        Raises CheckpointError if a node cannot write its copy, IncompatibleCheckpoint if a checkpoint has another format version, and the
        errors of `load` other than DamagedFiles.
        """
        if self.storage is None:
            return None
        checkpoint = None if verify_first else self.storage.find_unverified_checkpoint(self.generation)
        if checkpoint:
            try:
                load(*checkpoint, FileVerification(checkpoint[1].files, self.storage.reader_groups))
            except DamagedFiles:
                checkpoint = None  # the search below reports the damage
        if checkpoint is None:
            checkpoint = self.storage.find_newest_checkpoint(self.generation)
            if checkpoint is None:
                return None
            load(*checkpoint, None)
        step, run_id = checkpoint[1].step, checkpoint[1].run_id
        self.storage.sync_sidecar_files(step)
        self.latest_step = self._committed_step = step
        self.run_id = run_id or self.run_id
        return checkpoint

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint of `progress` to save_dir, which must be set.

        First waits until the previous checkpoint is committed. Unless trainer.save_in_background is set, also waits until the new
        checkpoint is committed. If a checkpoint cannot be written, a warning is reported and training continues; the next checkpoint may
        succeed. Raises WorldError if a newer world has taken over.
        """
        self._finish_pending_save()
        try:
            self._start_save(progress)
        except CheckpointError as error:
            self._discard_failed_save(progress.step, None, error)
        if not self._runtime.config.trainer.save_in_background:
            self._finish_pending_save()

    def save_and_wait(self, progress: Progress) -> None:
        """Save a checkpoint of `progress` at the end of a run or world, and wait until it is committed.

        A no-op if this step is already saved. Raises CheckpointError if the checkpoint cannot be written, WorldError if a newer world has
        taken over.
        """
        self._finish_pending_save()
        if self.save_dir is not None and self.latest_step != progress.step:
            self._wait_for_commit(self._start_save(progress))

    def stage_local_shard(self, staging_folder: Path, shard_number: int) -> tuple[TensorStorageWriter, dict[str, Any]]:
        """Copy this rank's tensors into the staging buffer, without communication.

        Return the writer that will write these tensors to `staging_folder` as shard number `shard_number`, and the tensor index of this
        shard: dtype, shape and chunks of each tensor, by name.
        """
        if self._pending_save:
            self._pending_save.write_task.wait_until_done()  # the pending write uses the same buffer, the commit does not
        writer = TensorStorageWriter(staging_folder, shard_number, self._staging_buffer)
        return writer, writer.stage_local_tensors(self._state.collect_tensors())

    def wait_for_pending_save(self) -> None:
        """Wait until the pending checkpoint, if any, is committed: at most 10 s for this rank's write, then at most 10 s for the commit.

        Called by a single rank, whose process is about to exit with an error. Does not communicate with other ranks.
        """
        if pending_save := self._pending_save:
            pending_save.write_task.wait_until_done(_DRAIN_TIMEOUT_SECONDS)
            if pending_save.commit_task:
                pending_save.commit_task.wait_until_done(_DRAIN_TIMEOUT_SECONDS)

    def take_completed_saves(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that this rank has committed since the last call.

        Rank 0 takes part in every commit. On ranks that do not commit checkpoints, the list is always empty.
        """
        commit_task = self._pending_save.commit_task if self._pending_save else None
        if commit_task and commit_task.is_done and not commit_task.has_failed:
            self._record_commit()
        completed, self._completed_saves = self._completed_saves, []
        return completed

    def _start_save(self, progress: Progress) -> _PendingSave:
        """Copy the state into host memory, start the tasks that write and commit it, and return the pending save.

        Raises CheckpointError if the state cannot be copied or the staging folder cannot be created, WorldError if a newer world has
        taken over.
        """
        save_dir, storage = self.save_dir, self.storage
        if save_dir is None or storage is None:
            raise ValueError("cannot save a checkpoint without trainer.save_dir")
        start_time, in_background = time.monotonic(), self._runtime.config.trainer.save_in_background
        folder = storage.create_staging_folder(progress.step, self.generation)
        writer = storage.build_storage_writer(folder, self._staging_buffer)
        tensors = self._state.collect_tensors()
        if storage.nodes is None:  # on a node's own disk, no other node could replace a lost file with these tensors
            tensors |= self._state.collect_rank_tensors()
        writer.stage_shards(tensors)
        stall_seconds = time.monotonic() - start_time

        def write_shard() -> None:
            write_completion_marker(folder, self._runtime.rank, writer.write_staged_shards())

        def commit_when_written() -> SavedCheckpoint:
            path = storage.commit_checkpoint(
                folder, self._all_written, lambda files: self.commit_checkpoint(save_dir, folder, progress, files, writer.tensor_index)
            )
            save_seconds = time.monotonic() - start_time
            return SavedCheckpoint(progress.step, path, save_seconds, stall_seconds if in_background else save_seconds)

        self._all_written.clear()
        write_task = BackgroundTask(lambda: commit.run_and_convert_os_errors(save_dir, write_shard))
        commit_task = BackgroundTask(commit_when_written) if storage.is_leader else None
        self._pending_save = _PendingSave(progress.step, folder, write_task, commit_task)
        self.latest_step = progress.step
        return self._pending_save

    def _wait_for_commit(self, pending_save: _PendingSave) -> None:
        """Wait until `pending_save` is committed.

        Raises CheckpointError if any rank cannot write or commit the checkpoint, WorldError if a newer world has taken over.
        """
        # First wait until each rank has written its shard: this collective detects a dead rank, while the commit would wait for it.
        collectives.run_on_all_ranks(pending_save.write_task.result)
        self._all_written.set()
        collectives.run_on_all_ranks(self._record_commit)
        self._committed_step, self._pending_save = pending_save.step, None

    def _finish_pending_save(self) -> None:
        """Wait until no checkpoint is being written. If the pending checkpoint cannot be written, remove it and report a warning.

        Raises WorldError if a newer world has taken over.
        """
        if pending_save := self._pending_save:
            try:
                self._wait_for_commit(pending_save)
            except CheckpointError as error:
                self._discard_failed_save(pending_save.step, pending_save, error)

    def _discard_failed_save(self, step: int, pending_save: _PendingSave | None, error: CheckpointError) -> None:
        """Discard the incomplete checkpoint of `step`, and report `error` as the reason.

        `pending_save` is None if the save failed before its tasks were started. Called when all ranks have raised this error, and no rank
        is still writing.
        """
        self.latest_step, self._pending_save = self._committed_step, None
        if pending_save and pending_save.commit_task:
            commit.discard_staging_folder(pending_save.folder)
            self._all_written.set()  # a task that waits for shards then fails: the folder is gone, or the deadline passes
            pending_save.commit_task.wait_until_done()
        rank_prefix = f"rank {error.rank}: " if error.rank is not None else ""
        newest_text = (
            "no checkpoint exists yet" if self._committed_step is None else f"the newest checkpoint is from step {self._committed_step}"
        )
        self._report_warning(f"cannot save the checkpoint of step {step}: {rank_prefix}{error}; training continues, {newest_text}")

    def _record_commit(self) -> None:
        """Wait until this rank has committed the pending checkpoint, and record it. Raises the error of the commit if it failed.

        A no-op on ranks that do not commit checkpoints, and if the commit is already recorded.
        """
        pending_save = self._pending_save
        if pending_save and pending_save.commit_task:
            self._completed_saves.append(pending_save.commit_task.result())
            self._pending_save = replace(pending_save, commit_task=None)

    def _wait_for_just_in_time_checkpoint(self) -> None:
        """Wait until the surviving ranks of the previous world have written their just-in-time checkpoint.

        If this world claimed save_dir earlier, the surviving ranks could no longer commit their checkpoint.
        """
        if self._runtime.is_rank_zero and self._runtime.coordinator_address and self.save_dir:
            just_in_time.wait_for_just_in_time_checkpoint(CoordinatorClient(self._runtime.coordinator_address))

    def commit_checkpoint(
        self, save_dir: Path, staging_folder: Path, progress: Progress, file_digests: FileDigests, tensor_index: dict[str, Any]
    ) -> Path:
        """Write the manifest and publish `staging_folder` as the checkpoint of `progress`. Return its path. Called by one rank.

        `file_digests`: digests of the files in the folder; `tensor_index`: index of the tensors in these files. Raises WorldError if a
        newer world has taken over, CheckpointError if a file is missing, OSError if the disk cannot be written.
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
            files=file_digests,
            tensors=tensor_index,
            config=config.model_dump(mode="json"),
            versions={"torch": torch.__version__, "swarmtrain": swarmtrain.__version__},
            validation_loss=progress.validation_loss,
            run_id=self.run_id,
            state={**self._state.collect_non_tensor_state(), "script": self._script, **_describe_reproducibility(config)},
        )
        path = commit.commit_checkpoint(save_dir, staging_folder, manifest)
        self._known_checkpoints.pop(path, None)
        try:
            commit.prune_checkpoints(save_dir, RetentionPolicy.from_config(config.trainer), self.generation, self._known_checkpoints)
        except OSError as error:
            LOG.warning("%s: an old checkpoint cannot be removed: %s", save_dir, describe_os_error(error))
        return path


def _describe_reproducibility(config: Config) -> dict[str, str]:
    """Return which runs have equal losses, if the config allows sums of gradients that are not exact."""
    text = config.topology.gradient_compression.reproducibility
    return {REPRODUCIBILITY_KEY: text} if text else {}
