"""Training loop of a custom script: resume it, save checkpoints when due, and exit all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader

from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress, SavedCheckpoint
from swarmtrain.trainer.checkpoint.save_interval import SaveInterval
from swarmtrain.trainer.checkpoint.storage import discovery
from swarmtrain.trainer.checkpoint.storage.discovery import WarningReporter
from swarmtrain.trainer.custom.data_sharding import ShardedLoader, can_shard_loader
from swarmtrain.trainer.custom.finite_checks import check_parameters
from swarmtrain.trainer.custom.prefetch import BatchPrefetcher
from swarmtrain.trainer.custom.user_state import UserState, describe_changes_since_checkpoint
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.random_seeds import seed_everything
from swarmtrain.trainer.runtime import Runtime

_REQUIRED_CALLS = {"save_if_due": "run.save_if_due()", "stop_requested": "if run.stop_requested: run.save_and_exit()"}


class _StepAgreement(NamedTuple):
    """Stop flag, save flag and number of ranks with a next batch, all-reduced at one step: equal on all ranks."""

    step: int
    stop_requested: bool = False
    """Whether a stop was requested on any rank."""
    save_requested: bool = False
    """Whether a checkpoint is due by rank 0's clock."""
    ranks_with_next_batch: int = 0
    """Number of ranks that have a batch for the next step."""


class TrainingLoop:
    """Runs the steps of a custom script, and saves its registered objects. All methods are collective: every rank must call them."""

    def __init__(
        self, runtime: Runtime, group: dist.ProcessGroup | None, user_state: UserState, stop_flag: StopFlag, report_warning: WarningReporter
    ) -> None:
        """Load the newest checkpoint in trainer.save_dir; if there is none, the newest checkpoint in trainer.load_dir.

        Raises the errors of CheckpointManager and UserState.load_checkpoint; TrainingError if trainer.load_dir has no complete checkpoint.
        """
        self._runtime, self._group, self._user_state, self._stop, self._report_warning = (
            runtime,
            group,
            user_state,
            stop_flag,
            report_warning,
        )
        self._checkpoint_manager = CheckpointManager(runtime, user_state, "", report_warning)
        self._save_interval: SaveInterval | None = None
        self._called_names: set[str] = set()
        self._agreement = _StepAgreement(step=-1)
        self._has_next_batch = False
        """Whether this rank has a batch for the next step. Used only if the data is not sharded."""
        self.progress = Progress()
        self.loss_weight = 1.0
        self.epoch = 0
        self.is_done = False
        """Whether the loop has reached its requested number of epochs or steps."""
        self._max_steps: int | None = None
        user_state.collect_tensors()  # before any training, raise an error if an object cannot be saved
        self.resumed_from = self._checkpoint_manager.load_newest_checkpoint(user_state.load_checkpoint)
        checkpoint = self.resumed_from or self._find_load_dir_checkpoint()
        if checkpoint:
            if not self.resumed_from:
                user_state.load_checkpoint(*checkpoint)
            for line in describe_changes_since_checkpoint(checkpoint, runtime.config) if runtime.is_rank_zero else ():
                report_warning(f"{checkpoint[0]}: {line}")
            if self.resumed_from or runtime.config.trainer.load_context:
                self.progress = Progress(checkpoint[1].step, checkpoint[1].consumed_samples)
            else:
                user_state.data_layout.clear()

    def iterate_steps(self, data: Iterable[Any], epochs: int | None, max_steps: int | None, global_batch_size: int | None) -> Iterator[Any]:
        """Yield the remaining batches of `data` on this rank.

        Raises TrainingError if the loop does not use both save_if_due() and stop_requested, or if the data cannot be sharded.
        """
        if self._save_interval:
            raise TrainingError(
                "was called a second time", place="steps", hint="use steps() only in the training loop; iterate over other data directly"
            )
        if isinstance(data, DataLoader) and can_shard_loader(data):
            sharded_loader = ShardedLoader(
                data,
                self._runtime.rank,
                self._runtime.world_size,
                self._seed,
                global_batch_size or self._user_state.data_layout.get("global_batch_size"),
            )
            batches = self._iterate_sharded_batches(sharded_loader, epochs, max_steps)
        else:
            batches = self._iterate_unsharded_batches(data, epochs, max_steps)
        for local_batch in batches:
            number = self.progress.step + 1
            seed_everything(self._seed, "step", number, self._runtime.rank)
            self.progress = self.progress.advance_to_step(number, number * int(self._user_state.data_layout["global_batch_size"]))
            yield local_batch
            if missing_calls := [line for name, line in _REQUIRED_CALLS.items() if name not in self._called_names]:
                hint = "call both at the end of each step; without run.steps() neither is required"
                raise TrainingError(f"the loop lacks `{'` and `'.join(missing_calls)}`", place="steps", hint=hint)
        self.is_done = True

    @property
    def run_id(self) -> str:
        """Id of the run, for its checkpoints; empty if it is unknown."""
        return self._checkpoint_manager.run_id

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested on any rank."""
        self._called_names.add("stop_requested")
        return self._all_reduce_stop_and_save_flags().stop_requested

    def save_if_due(self, metric: float | None) -> list[SavedCheckpoint]:
        """Start saving a checkpoint of this step if one is due. Return the checkpoints that this rank has committed since the last call.

        `metric`: validation metric of this step; None if it was not evaluated. Raises WorldError if a newer world has taken over,
        TrainingError outside the loop over steps().
        """
        self._called_names.add("save_if_due")
        if metric is not None:
            self.progress = self.progress.with_validation_loss(metric)
        save_interval, progress = self._save_interval, self.progress
        if save_interval is None:
            raise TrainingError(
                "was called outside of the loop over run.steps()", place="save_if_due", hint="call it inside the loop over run.steps()"
            )
        is_due = self._all_reduce_stop_and_save_flags().save_requested or save_interval.is_due_by_schedule(
            progress.step, progress.consumed_samples, has_validation_loss=metric is not None
        )
        if is_due and self._checkpoint_manager.latest_step != progress.step:
            check_parameters(self._user_state.list_parameters(), progress.step)
            self._checkpoint_manager.save(progress)
            save_interval.record_stall(0.0)
        checkpoints = self._checkpoint_manager.take_completed_saves()
        for saved in checkpoints:
            save_interval.record_stall(saved.stall_seconds)
            save_interval.record_write(saved.save_seconds)
        return checkpoints

    def save_and_wait(self) -> list[SavedCheckpoint]:
        """Save a checkpoint of this step, and wait until it is committed.

        Return the checkpoints that this rank has committed since the last call. Raises CheckpointError if the checkpoint cannot
        be written, WorldError if a newer world has taken over, TrainingError if a parameter contains NaN or Inf.
        """
        if self.progress.step:
            check_parameters(self._user_state.list_parameters(), self.progress.step)
            self._checkpoint_manager.save_and_wait(self.progress)
        return self._checkpoint_manager.take_completed_saves()

    def _all_reduce_stop_and_save_flags(self) -> _StepAgreement:
        """All-reduce stop requests, save requests and the number of ranks with a next batch over all ranks, and return the result.

        One all-reduce per step: later calls at the same step return the same result.
        """
        if self._agreement.step != self.progress.step:
            is_save_due = self._runtime.is_rank_zero and self._save_interval is not None and self._save_interval.is_due_by_clock
            stop_requested, save_requested, ranks_with_next_batch = collectives.all_reduce_sum(
                [self._stop.is_set, is_save_due, self._has_next_batch], self._group
            )
            self._agreement = _StepAgreement(self.progress.step, stop_requested > 0, save_requested > 0, int(ranks_with_next_batch))
        return self._agreement

    def _iterate_sharded_batches(self, sharded_loader: ShardedLoader, epochs: int | None, max_steps: int | None) -> Iterator[Any]:
        data_layout = {
            "global_batch_size": sharded_loader.global_batch_size,
            "sample_count": sharded_loader.sample_count,
            "steps_per_epoch": sharded_loader.steps_per_epoch,
        }
        for name, saved_value in self._user_state.data_layout.items():
            if saved_value != data_layout.get(name):
                hint = "restore the data and the batch size, or choose another trainer.save_dir"
                raise IncompatibleCheckpoint(
                    f"was trained with {name} {saved_value}, but this run has {data_layout.get(name)}", place="steps", hint=hint
                )
        self._start_loop(
            data_layout, sharded_loader.sample_count, sharded_loader.steps_per_epoch * (epochs or 1) if max_steps is None else max_steps
        )
        while self._has_steps_left():
            for local_batch, weight in sharded_loader.iterate_batches(self.progress.step):
                self.loss_weight = weight
                self.epoch = self.progress.step // sharded_loader.steps_per_epoch
                yield local_batch
                if not self._has_steps_left():
                    return

    def _iterate_unsharded_batches(self, data: Iterable[Any], epochs: int | None, max_steps: int | None) -> Iterator[Any]:
        """Yield the batches of data that cannot be sharded.

        After a restart the data is read from the start, and the batches that were already processed are skipped.
        """
        saved_world_size = self._user_state.data_layout.get("ranks", self._runtime.world_size)
        if saved_world_size != self._runtime.world_size:
            self._report_warning(
                f"the number of ranks has changed from {saved_world_size} to {self._runtime.world_size} since the checkpoint: "
                "each rank now reads different data"
            )
        world_size = self._runtime.world_size
        self._start_loop({"global_batch_size": 1, "ranks": world_size}, 0, max_steps)
        steps_to_skip = self.progress.step
        for self.epoch in range(epochs or (1 if max_steps is None else 1 << 62)):
            prefetcher = BatchPrefetcher(data, partial(seed_everything, self._seed, "data", self._runtime.rank, self.epoch))
            self._check_all_ranks_have_batch(prefetcher)
            steps_to_skip -= max(collectives.all_gather_values(prefetcher.skip_batches(steps_to_skip), self._group))
            if steps_to_skip:
                continue
            (ranks_with_batch,) = collectives.all_reduce_sum([prefetcher.has_next], self._group)
            while ranks_with_batch:
                if not self._has_steps_left():
                    return
                local_batch, is_new = prefetcher.take_batch()
                self.loss_weight, self._has_next_batch = world_size / ranks_with_batch if is_new else 0.0, prefetcher.has_next
                yield local_batch
                ranks_with_batch = self._all_reduce_stop_and_save_flags().ranks_with_next_batch

    def _check_all_ranks_have_batch(self, prefetcher: BatchPrefetcher) -> None:
        """Raise TrainingError if the data of any rank is empty."""
        has_batch_by_rank = collectives.all_gather_values(prefetcher.has_next, self._group)
        if not any(has_batch_by_rank):
            hint = "pass a non-empty iterable; an iterator can be read only once"
            raise TrainingError("the data has no batches: it is empty or already exhausted", place="steps", hint=hint)
        if not all(has_batch_by_rank):
            hint = "give each rank a shard with at least one batch, selected by run.rank and run.world_size"
            raise TrainingError(f"rank {has_batch_by_rank.index(False)} has no batch, but other ranks have", place="steps", hint=hint)

    def _start_loop(self, data_layout: dict[str, Any], sample_count: int, max_steps: int | None) -> None:
        self._user_state.data_layout = data_layout
        self._max_steps = max_steps
        self._save_interval = SaveInterval(self._runtime.config.trainer, sample_count, data_layout["global_batch_size"])

    def _has_steps_left(self) -> bool:
        return self._max_steps is None or self.progress.step < self._max_steps

    @property
    def _seed(self) -> int:
        return self._runtime.config.trainer.seed

    def _find_load_dir_checkpoint(self) -> discovery.CheckpointWithManifest | None:
        for folder in self._runtime.config.trainer.load_dir:
            if checkpoint := discovery.find_newest_checkpoint_in_folder(self._runtime, folder, self._report_warning):
                return checkpoint
            raise TrainingError(
                "has no complete checkpoint", place=f"config trainer.load_dir {folder}", hint="check that it is mounted on this machine"
            )
        return None
