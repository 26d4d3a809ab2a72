"""One optimizer step of all learners: each learner processes its own part of the global batch and updates its own parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain

from torch import Tensor

from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.diloco.learner import Learner
from swarmtrain.trainer.diloco.optimizer import DilocoOptimizer
from swarmtrain.trainer.forward_backward import MicroBatches, run_forward_backward
from swarmtrain.trainer.health.step_timer import COMMUNICATION, DATA, LOGGING, OPTIMIZER, OTHER, StepTimer
from swarmtrain.trainer.optim import OptimizerUpdate
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import (
    StepRequest,
    StepResult,
    build_batches,
    describe_non_finite_values,
    get_accuracy,
    reduce_values_over_ranks,
)


@dataclass(frozen=True)
class _LocalResult:
    """The result of the forward and backward passes of one learner on this rank."""

    learner: Learner
    micro_batches: MicroBatches
    update: OptimizerUpdate


@dataclass(frozen=True)
class _LearnerResult:
    """The result of one learner, summed over the ranks that train it."""

    loss_sum: float
    correct: float
    gradient_norm: float
    """Norm before clipping; 0 if the learner skips its step."""
    skipped: float
    """1 if the scaled gradients overflowed, so that this learner skips its step, else 0."""
    clipped: float
    """1 if the gradients were clipped, else 0."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite, or the learner skips its step."""
        return self.skipped > 0 or (math.isfinite(self.loss_sum) and math.isfinite(self.gradient_norm))


@dataclass(frozen=True)
class LearnerGradients:
    """The gradients of this rank's learners in one step: summed over each learner's ranks and clipped. No parameter has changed yet."""

    batch: GlobalBatch
    loss_token_counts: Sequence[int]
    """Number of loss tokens of each learner's part of the batch."""
    results: Sequence[_LocalResult]


def compute_gradients(
    runtime: Runtime, model: ParallelModel, optimizer: DilocoOptimizer, data: TokenDataset, request: StepRequest
) -> LearnerGradients:
    """Run the forward and backward passes of all learners in the requested step. Collective: all ranks must call it.

    Learner i of M reads part i of the M equal parts of the global batch. Its loss is the mean over the loss units of its part, and its
    gradients are clipped by their own norm.
    """
    timer = request.timer
    timer.start_phase(DATA)
    batch, next_batch = build_batches(data, request, runtime.config.topology.samples_per_step)
    loss_token_counts = [max(1, data.compute_loss_denominator(part)) for part in batch.ids.reshape(optimizer.learner_count, -1)]
    results = _run_learners(
        runtime, model, optimizer, data, request, batches=(batch, next_batch), loss_token_counts=loss_token_counts, timer=timer
    )
    return LearnerGradients(batch, loss_token_counts, results)


def apply_gradients(
    model: ParallelModel, optimizer: DilocoOptimizer, data: TokenDataset, gradients: LearnerGradients, request: StepRequest
) -> StepResult:
    """Update the parameters of all learners, and return the step's result. Collective: all ranks must call it.

    A NaN/Inf loss or gradient of one learner skips the step of all. The outer step is not part of this function: see
    DilocoOptimizer.finish_round. In the result, losses and counts are those of the global batch, and the gradient norm is the mean over the
    learners.
    """
    # As without learners, the last collective comes before the first parameter update.
    timer, results, loss_token_count = request.timer, gradients.results, sum(gradients.loss_token_counts)
    timer.start_phase(COMMUNICATION)
    flags = request.stop_flag.is_set, request.requests_save
    learner_results, replica_means, (stop_requested, save_requested) = _reduce_results(model, data, optimizer.learner_count, results, flags)
    loss_mean = sum(result.loss_sum for result in learner_results) / loss_token_count
    correct_fraction = sum(result.correct for result in learner_results) / loss_token_count
    update = _combine_updates(results, learner_results)
    timer.start_phase(OPTIMIZER)
    non_finite_reason = "" if all(result.is_finite for result in learner_results) else describe_non_finite_values(loss_mean, update)
    if non_finite_reason:
        update = replace(update, skipped=True)
        for learner in optimizer.learners:
            learner.inner_optimizer.skip_step()
    timer.start_phase(OPTIMIZER)
    optimizer.step(request.number)
    timer.start_phase(OTHER)
    return StepResult(
        request.number,
        tuple(int(sample) for result in results for _, ids in result.micro_batches for sample in ids),
        gradients.batch.loss_tokens,
        loss_mean,
        get_accuracy(model, correct_fraction),
        max(replica_means),
        update,
        stop_requested=stop_requested,
        save_requested=save_requested,
        non_finite_reason=non_finite_reason,
    )


def _run_learners(
    runtime: Runtime,
    model: ParallelModel,
    optimizer: DilocoOptimizer,
    data: TokenDataset,
    request: StepRequest,
    *,
    batches: tuple[GlobalBatch, GlobalBatch],
    loss_token_counts: Sequence[int],
    timer: StepTimer,
) -> list[_LocalResult]:
    """Run the forward and backward passes of this rank's learners, and prepare their steps.

    `batches`: the global batch of this step, and that of the next. `loss_token_counts`: number of loss tokens of each learner's part.
    """
    micro_batches, next_micro_batches = (
        [_select_micro_batches(runtime, model, each, learner) for learner in optimizer.learners] for each in batches
    )
    for _, ids in chain(*next_micro_batches):
        data.prefetch_samples(ids)  # read from the disk while this step is computed
    results = []
    for number, learner in enumerate(optimizer.learners):
        with learner.use_parameters():
            local_sums = run_forward_backward(
                runtime,
                model,
                data,
                micro_batches[number],
                next_micro_batches=[*micro_batches, next_micro_batches[0]][number + 1],
                step=request.number,
                scale_loss=partial(_scale_loss, learner, loss_token_counts[learner.index]),
                timer=timer,
            )
            model.sum_partial_gradients()
            with timer.time_phase(LOGGING):
                request.after_backward()
            timer.start_phase(OPTIMIZER)
            update = learner.inner_optimizer.prepare_step(request.number, *local_sums, check_results=request.check_results)
            learner.take_gradients()
        results.append(_LocalResult(learner, micro_batches[number], update))
    return results


def _scale_loss(learner: Learner, loss_token_count: int, loss: Tensor) -> Tensor:
    return learner.inner_optimizer.scale_loss(loss / loss_token_count)


def _select_micro_batches(runtime: Runtime, model: ParallelModel, batch: GlobalBatch, learner: Learner) -> MicroBatches:
    """Return this replica's micro batches of `learner`: for each, its index in the global batch and its sample ids."""
    topology, mesh = runtime.config.topology, model.mesh
    counts = learner.index * topology.micro_batches_per_learner, *mesh.micro_batches_per_replica
    return batch.select_micro_batches(counts, 1 + mesh.data_rank, topology.samples_per_micro_batch)


def _reduce_results(
    model: ParallelModel, data: TokenDataset, learner_count: int, results: Sequence[_LocalResult], flags: tuple[bool, bool]
) -> tuple[list[_LearnerResult], list[float], list[bool]]:
    """Reduce the local `results` and `flags` over all ranks. Collective: all ranks must call it.

    Return the result of each learner, the mean loss of each replica of each learner, and for each flag whether it is set on any rank. Each
    value of a rank has a place of its own in the sum, except losses of one learner, so the sums do not depend on the order of addition.
    """
    mesh, value_count = model.mesh, len(fields(_LearnerResult))
    values, replica_means = ([[0.0] * count for _ in range(learner_count)] for count in (value_count, mesh.data_size))
    for result in results:
        (loss_sum, correct), update, index = result.update.extra_scalars, result.update, result.learner.index
        common = (0.0 if update.skipped else update.gradient_norm, float(update.skipped), float(update.clipped))
        values[index] = [loss_sum, correct, *(common if mesh.data_rank == 0 else (0.0, 0.0, 0.0))]  # all replicas have the same
        if loss_token_count := sum(data.compute_loss_denominator(ids) for _, ids in result.micro_batches):
            replica_means[index][mesh.data_rank] = loss_sum / loss_token_count
    sums, reduced_flags = reduce_values_over_ranks(model, [*chain(*values, *replica_means)], *flags)
    starts = range(0, learner_count * value_count, value_count)
    return [_LearnerResult(*sums[start : start + value_count]) for start in starts], sums[learner_count * value_count :], reduced_flags


def _combine_updates(results: Sequence[_LocalResult], learner_results: Sequence[_LearnerResult]) -> OptimizerUpdate:
    """Return the update that metrics report: the gradient norm is the mean over all learners, and the loss scale that of a learner."""
    non_finite_counts: Counter[str] = Counter()
    for result in results:
        non_finite_counts.update(result.update.non_finite_counts)
    return replace(
        results[0].update,
        gradient_norm=sum(result.gradient_norm for result in learner_results) / len(learner_results),
        skipped=all(result.skipped for result in learner_results),
        clipped=any(result.clipped for result in learner_results),
        non_finite_counts=non_finite_counts,
    )
