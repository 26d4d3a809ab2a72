"""One optimizer step of all learners: each learner processes its own part of the global batch and updates its own parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.diloco.learner import Learner
from swarmtrain.trainer.diloco.optimizer import DilocoOptimizer
from swarmtrain.trainer.forward_backward import MicroBatches, run_forward_backward
from swarmtrain.trainer.health.step_timer import COMMUNICATION, DATA, LOGGING, OPTIMIZER, OTHER, StepTimer
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.optim import OptimizerUpdate
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import StepResult, describe_non_finite_values, get_accuracy, reduce_values_over_ranks

_LOSS, _CORRECT, _NORM, _SKIPPED, _CLIPPED = range(5)
"""Indices of the values of a learner that are reduced over ranks."""
_VALUES_PER_LEARNER = 5


def train_step(
    runtime: Runtime,
    model: ParallelModel,
    optimizer: DilocoOptimizer,
    data: TokenDataset,
    *,
    first_sample_position: int,
    step: int,
    stop_flag: StopFlag,
    request_save: bool,
    timer: StepTimer,
    after_backward: Callable[[], None],
    check_results: Callable[[], None],
) -> StepResult:
    """Run step `step` of all learners, as swarmtrain.trainer.step.train_step does without learners, and return its result.

    Learner i of M reads part i of the M equal parts of the global batch. Its loss is the mean over the loss units of its part, and its
    gradients are clipped by their own norm. A NaN/Inf loss or gradient of one learner skips the step of all. The outer step is not part of
    this function: see DilocoOptimizer.finish_round.

    In the result, losses and counts are those of the global batch, and the gradient norm is the mean over the learners.
    """
    topology, mesh = runtime.config.topology, model.mesh
    timer.start_phase(DATA)
    batch, next_batch = (
        data.build_batch(first, topology.samples_per_step)
        for first in (first_sample_position, first_sample_position + topology.samples_per_step)
    )
    local_micro_batches = [_select_micro_batches(runtime, model, batch, learner) for learner in optimizer.learners]
    next_micro_batches = [_select_micro_batches(runtime, model, next_batch, learner) for learner in optimizer.learners]
    for _, ids in (each for micro_batches in next_micro_batches for each in micro_batches):
        data.prefetch_samples(ids)
    loss_token_counts = [
        max(1, data.compute_loss_denominator(part)) for part in batch.ids.reshape(optimizer.learner_count, -1)
    ]
    updates: dict[int, OptimizerUpdate] = {}
    for number, learner in enumerate(optimizer.learners):
        following = [*local_micro_batches[number + 1 :], next_micro_batches[0]][0]
        with learner.use_parameters():
            local_sums = run_forward_backward(
                runtime,
                model,
                data,
                local_micro_batches[number],
                next_micro_batches=following,
                step=step,
                scale_loss=lambda loss, learner=learner: learner.inner_optimizer.scale_loss(loss / loss_token_counts[learner.index]),
                timer=timer,
            )
            model.sum_partial_gradients()
            with timer.time_phase(LOGGING):
                after_backward()
            timer.start_phase(OPTIMIZER)
            updates[learner.index] = learner.inner_optimizer.prepare_step(step, *local_sums, check_results=check_results)
            learner.take_gradients()
    # As without learners, the last collective comes before the first parameter update.
    timer.start_phase(COMMUNICATION)
    by_learner, replica_means, (stop_requested, save_requested) = _reduce_results(
        model, optimizer, data, updates, local_micro_batches, (stop_flag.is_set, request_save)
    )
    loss_mean, correct = (sum(values[kind] for values in by_learner) / sum(loss_token_counts) for kind in (_LOSS, _CORRECT))
    update = _combine_updates(updates, by_learner)
    timer.start_phase(OPTIMIZER)
    non_finite_reason = "" if _are_finite(by_learner) else describe_non_finite_values(loss_mean, update)
    if non_finite_reason:
        update = replace(update, skipped=True)
        for learner in optimizer.learners:
            learner.inner_optimizer.skip_step()
    timer.start_phase(OPTIMIZER)
    optimizer.step(step)
    timer.start_phase(OTHER)
    return StepResult(
        step,
        tuple(int(sample) for micro_batches in local_micro_batches for _, ids in micro_batches for sample in ids),
        batch.loss_tokens,
        loss_mean,
        get_accuracy(model, correct),
        max(replica_means),
        update,
        stop_requested=stop_requested,
        save_requested=save_requested,
        non_finite_reason=non_finite_reason,
    )


def _select_micro_batches(runtime: Runtime, model: ParallelModel, batch: GlobalBatch, learner: Learner) -> MicroBatches:
    """Return the micro batches of `learner` that this rank's replica processes: for each, its index in the global batch and its sample ids."""
    topology, mesh = runtime.config.topology, model.mesh
    counts = learner.index * topology.micro_batches_per_learner, *mesh.micro_batches_per_replica
    return batch.select_micro_batches(counts, 1 + mesh.data_rank, topology.samples_per_micro_batch)


def _reduce_results(
    model: ParallelModel,
    optimizer: DilocoOptimizer,
    data: TokenDataset,
    updates: Mapping[int, OptimizerUpdate],
    local_micro_batches: Sequence[MicroBatches],
    flags: tuple[bool, bool],
) -> tuple[list[list[float]], list[float], list[bool]]:
    """Return for each learner its five reduced values, the mean loss of each replica of each learner, and `flags`, set if set on any rank.

    Each value has a place of its own in the sum over ranks, so the result does not depend on the order of addition.
    """
    mesh = model.mesh
    values = [[0.0] * _VALUES_PER_LEARNER for _ in range(optimizer.learner_count)]
    replica_means = [[0.0] * mesh.data_size for _ in range(optimizer.learner_count)]
    for (index, update), micro_batches in zip(updates.items(), local_micro_batches, strict=True):
        loss_sum, correct = update.extra_scalars
        is_first_replica = mesh.data_rank == 0
        norm = 0.0 if update.skipped or not is_first_replica else update.gradient_norm
        values[index] = [loss_sum, correct, norm, float(update.skipped and is_first_replica), float(update.clipped and is_first_replica)]
        if token_count := sum(data.compute_loss_denominator(ids) for _, ids in micro_batches):
            replica_means[index][mesh.data_rank] = loss_sum / token_count
    flat = [value for rows in (values, replica_means) for row in rows for value in row]
    sums, reduced_flags = reduce_values_over_ranks(model, flat, *flags)
    count = optimizer.learner_count * _VALUES_PER_LEARNER
    by_learner = [sums[start : start + _VALUES_PER_LEARNER] for start in range(0, count, _VALUES_PER_LEARNER)]
    return by_learner, sums[count:], reduced_flags


def _are_finite(by_learner: Sequence[Sequence[float]]) -> bool:
    """Return whether loss and gradient norm of each learner are finite. A learner whose scaled gradients overflowed skips only its own step."""
    return all(values[_SKIPPED] or (math.isfinite(values[_LOSS]) and math.isfinite(values[_NORM])) for values in by_learner)


def _combine_updates(updates: Mapping[int, OptimizerUpdate], by_learner: Sequence[Sequence[float]]) -> OptimizerUpdate:
    """Return the update of a step as metrics report it, given those of this rank's learners and the reduced values of all learners."""
    counts: dict[str, int] = {}
    for update in updates.values():
        for name, count in update.non_finite_counts.items():
            counts[name] = counts.get(name, 0) + count
    return replace(
        next(iter(updates.values())),
        gradient_norm=sum(values[_NORM] for values in by_learner) / len(by_learner),
        skipped=all(values[_SKIPPED] for values in by_learner),
        clipped=any(values[_CLIPPED] for values in by_learner),
        non_finite_counts=counts,
    )
