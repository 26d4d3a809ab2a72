"""Steps of a custom script: on any data, which a DataLoader shards over the ranks, with the objects that the script has registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import Progress
from swarmtrain.trainer.checkpoint.resume_changes import describe_changes_since_checkpoint
from swarmtrain.trainer.checkpoint.save_interval import SaveInterval
from swarmtrain.trainer.checkpoint.storage import discovery
from swarmtrain.trainer.custom.data_sharding import BatchPrefetcher, ShardedLoader, can_shard_loader
from swarmtrain.trainer.custom.finite_checks import check_parameters
from swarmtrain.trainer.custom.training_loop import TrainingLoop
from swarmtrain.trainer.custom.user_state import UserState
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.metrics import RunReporter
from swarmtrain.trainer.random_seeds import seed_everything
from swarmtrain.trainer.runtime import Runtime

_USED_VERSION = "swarmtrain_used_version"
"""Attribute of a gradient: the version that its last optimizer step has used. A tensor's version counts its changes in place."""


class _StepAgreement(NamedTuple):
    """Stop flag, save flag and number of ranks with a next batch, all-reduced at one step: equal on all ranks."""

    step: int
    stop_requested: bool = False
    """Whether a stop was requested on any rank."""
    save_requested: bool = False
    """Whether a checkpoint is due by rank 0's clock."""
    ranks_with_next_batch: int = 0
    """Number of ranks that have a batch for the next step."""


class ScriptLoop(TrainingLoop):
    """Runs the steps of a custom script, and saves its registered objects. All methods are collective: every rank must call them."""

    def __init__(
        self, runtime: Runtime, group: dist.ProcessGroup | None, user_state: UserState, *, stop_flag: StopFlag, reporter: RunReporter
    ) -> None:
        """Load the newest checkpoint in trainer.save_dir; if there is none, the newest checkpoint in trainer.load_dir.

        Raises the errors of CheckpointManager and UserState.load_checkpoint; TrainingError if trainer.load_dir has no complete checkpoint.
        """
        super().__init__(runtime, user_state, "", stop_flag, reporter)
        self._group, self._user_state = group, user_state
        self._agreement = _StepAgreement(step=-1)
        self._has_next_batch = False
        """Whether this rank has a batch for the next step. Used only if the data is not sharded."""
        self._accumulation = GradientAccumulation(user_state.list_optimizers())
        self._accumulating_step = -1, False
        """The step that was checked last, and whether any rank had accumulated gradients then."""
        self.loss_weight = 1.0
        self.epoch = 0
        self._is_done = False
        """Whether the loop has reached its requested number of epochs or steps."""
        self._max_steps: int | None = None
        user_state.collect_tensors()  # before any training, raise an error if an object cannot be saved
        resumed_from = self.checkpoint_manager.load_newest_checkpoint(user_state.load_checkpoint)
        checkpoint = resumed_from or self._find_load_dir_checkpoint()
        if checkpoint:
            if not resumed_from:
                user_state.load_checkpoint(*checkpoint)
            for line in describe_changes_since_checkpoint(checkpoint[1], runtime.config) if runtime.is_rank_zero else ():
                reporter.report_warning(f"{checkpoint[0]}: {line}")
            if resumed_from:
                _check_same_seed(resumed_from, runtime.config.trainer.seed)
            if resumed_from or runtime.config.trainer.load_context:
                self.progress = Progress(checkpoint[1].step, checkpoint[1].consumed_samples)
            else:
                user_state.data_layout.clear()
        reporter.report_script_start(
            self.progress.step,
            resumed_from[0] if resumed_from else None,
            self.checkpoint_manager.run_id,
            self.checkpoint_manager.generation,
            sum(parameter.numel() for parameter in user_state.list_parameters().values()),
        )

    @property
    def is_done(self) -> bool:
        """Whether the loop has reached its requested number of epochs or steps."""
        return self._is_done

    @property
    def any_rank_requests_stop(self) -> bool:
        """Whether a stop was requested on any rank; False while gradients are accumulated, which no checkpoint has."""
        return self._all_reduce_stop_and_save_flags().stop_requested and not self._is_accumulating()

    @property
    def any_rank_requests_save(self) -> bool:
        """Whether a checkpoint is due by the clock of rank 0."""
        return self._all_reduce_stop_and_save_flags().save_requested

    def can_save(self) -> bool:
        """Return whether this step can be saved: not while gradients are accumulated, which no checkpoint has."""
        return not self._is_accumulating()

    def check_before_save(self) -> None:
        """Raise TrainingError if a trained parameter of a registered module contains NaN or Inf."""
        check_parameters(self._user_state.list_parameters(), self.progress.step)

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
                self.runtime.rank,
                self.runtime.world_size,
                self._seed,
                global_batch_size or self._user_state.data_layout.get("global_batch_size"),
            )
            batches = self._iterate_sharded_batches(sharded_loader, epochs, max_steps)
        else:
            batches = self._iterate_unsharded_batches(data, epochs, max_steps)
        for local_batch in batches:
            number = self.progress.step + 1
            seed_everything(self._seed, "step", number, self.runtime.rank)
            self._accumulation.start_step()
            self.progress = self.progress.advance_to_step(number, number * int(self._user_state.data_layout["global_batch_size"]))
            yield local_batch
            self.check_required_calls()
        self._is_done = True

    def _all_reduce_stop_and_save_flags(self) -> _StepAgreement:
        """All-reduce stop requests, save requests and the number of ranks with a next batch over all ranks, and return the result.

        One all-reduce per step: later calls at the same step return the same result.
        """
        if self._agreement.step != self.progress.step:
            is_save_due = self.runtime.is_rank_zero and self._save_interval is not None and self._save_interval.is_due_by_clock
            stop_requested, save_requested, ranks_with_next_batch = collectives.all_reduce_sum(
                [self._stop.is_set, is_save_due, self._has_next_batch], self._group
            )
            self._agreement = _StepAgreement(self.progress.step, stop_requested > 0, save_requested > 0, int(ranks_with_next_batch))
        return self._agreement

    def _is_accumulating(self) -> bool:
        if self._accumulating_step[0] != self.progress.step:
            is_accumulating = collectives.all_reduce_sum([self._accumulation.has_unused_gradients()], self._group)[0] > 0
            self._accumulating_step = self.progress.step, is_accumulating
        return self._accumulating_step[1]

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
        saved_world_size = self._user_state.data_layout.get("ranks", self.runtime.world_size)
        if saved_world_size != self.runtime.world_size:
            self.reporter.report_warning(
                f"the number of ranks has changed from {saved_world_size} to {self.runtime.world_size} since the checkpoint: "
                "each rank now reads different data"
            )
        world_size = self.runtime.world_size
        self._start_loop({"global_batch_size": 1, "ranks": world_size}, 0, max_steps)
        steps_to_skip = self.progress.step
        for self.epoch in range(epochs or (1 if max_steps is None else 1 << 62)):
            prefetcher = BatchPrefetcher(data, partial(seed_everything, self._seed, "data", self.runtime.rank, self.epoch))
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
        self._save_interval = SaveInterval(self.runtime.config.trainer, sample_count, data_layout["global_batch_size"])

    def _has_steps_left(self) -> bool:
        return self._max_steps is None or self.progress.step < self._max_steps

    @property
    def _seed(self) -> int:
        return self.runtime.config.trainer.seed

    def _find_load_dir_checkpoint(self) -> discovery.CheckpointWithManifest | None:
        for folder in self.runtime.config.trainer.load_dir:
            if checkpoint := discovery.find_newest_checkpoint_in_folder(self.runtime, folder, self.reporter.report_warning):
                return checkpoint
            raise TrainingError(
                "has no complete checkpoint", place=f"config trainer.load_dir {folder}", hint="check that it is mounted on this machine"
            )
        return None


def _check_same_seed(checkpoint: discovery.CheckpointWithManifest, seed: int) -> None:
    """Raise IncompatibleCheckpoint if the run has another seed: its samples would be in another order, so some would be read twice."""
    saved_seed = checkpoint[1].rng.get("seed", seed)
    if saved_seed != seed:
        raise IncompatibleCheckpoint(
            f"was trained with trainer.seed {saved_seed}, but the config has {seed}: its samples would be in another order",
            place=str(checkpoint[0]),
            hint="restore trainer.seed, or start another run from it, with trainer.load_dir and another trainer.save_dir",
        )


class GradientAccumulation:
    """Whether the optimizers of a script have gradients that no optimizer step has used."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Record from now on when one of `optimizers` makes a step."""
        self._optimizers = list(optimizers)
        self._used_in_step: set[int] = set()
        for number, optimizer in enumerate(self._optimizers):
            optimizer.register_step_post_hook(lambda *_, number=number: self._record_optimizer_step(number))

    def start_step(self) -> None:
        """Record that the next batch is about to be processed."""
        self._used_in_step.clear()

    def has_unused_gradients(self) -> bool:
        """Return whether an optimizer that made no step with this batch has gradients that are new since its last step, and not zero."""
        return any(self._has_unused_gradients(number) for number in range(len(self._optimizers)) if number not in self._used_in_step)

    def _has_unused_gradients(self, number: int) -> bool:
        new = [gradient for gradient in self._list_gradients(number) if getattr(gradient, _USED_VERSION, None) != gradient._version]
        return any(bool(gradient.count_nonzero()) for gradient in new)

    def _record_optimizer_step(self, number: int) -> None:
        self._used_in_step.add(number)
        for gradient in self._list_gradients(number):
            setattr(gradient, _USED_VERSION, gradient._version)

    def _list_gradients(self, number: int) -> list[torch.Tensor]:
        parameters = (parameter for group in self._optimizers[number].param_groups for parameter in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
