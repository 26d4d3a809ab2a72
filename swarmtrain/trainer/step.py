"""One optimizer step, and one evaluation on validation data, with their collectives and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from swarmtrain.config import Config
from swarmtrain.trainer import collectives
from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.forward_backward import MicroBatches, run_forward_backward, run_validation_forward
from swarmtrain.trainer.health.step_timer import COMMUNICATION, DATA, LOGGING, OPTIMIZER, OTHER, StepTimer
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.model.objective import EmbeddingObjective
from swarmtrain.trainer.optim import Optimizer, OptimizerUpdate, gradient_checks
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime


def _do_nothing() -> None: ...


@dataclass(frozen=True)
class StepRequest:
    """An optimizer step that is to be run."""

    number: int
    """Number of the step; the first step is 1."""
    first_sample_position: int
    """Position of the first sample of the step's global batch in the order of all samples."""
    stop_flag: StopFlag
    """This rank's stop flag."""
    timer: StepTimer = field(default_factory=lambda: StepTimer(torch.device("cpu")))
    """Is notified at the start of each phase."""
    requests_save: bool = False
    """Whether this rank requests a checkpoint."""
    after_backward: Callable[[], None] = _do_nothing
    """Is called once the backward passes are complete."""
    batch: GlobalBatch | None = None
    """The step's global batch; None: the batch at `first_sample_position`."""
    check_results: Callable[[], None] = _do_nothing
    """Is called when the results of collectives are known, before they are used (see Optimizer.prepare_step)."""


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step, summed over all ranks and clipped. No parameter has changed yet."""

    batch: GlobalBatch
    """Global batch of the step."""
    micro_batches: MicroBatches
    """Micro batches of this replica."""
    update: OptimizerUpdate
    """The prepared update: gradient norm, learning rates, loss scale, and this rank's loss and number of correct loss units."""

    @property
    def loss_token_count(self) -> int:
        """Divisor of the summed loss; 1 if the loss mask excludes all tokens."""
        return max(1, self.batch.loss_denominator)


@dataclass(frozen=True)
class ValidationResult:
    """The result of evaluating the validation data; equal on every rank."""

    loss: float
    """Validation loss: mean over the loss units of the objective (tokens, pairs or queries), in nats."""
    accuracy: float | None
    """Accuracy, defined as for StepResult.accuracy."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step; equal on every rank except for `sample_ids`."""

    number: int
    """Number of the step; the first step is 1."""
    sample_ids: tuple[int, ...]
    """Ids of the samples that this rank's replica processed."""
    loss_tokens: int
    """Number of loss tokens, summed over all replicas."""
    loss: float
    """Training loss: mean over the loss units of the objective (tokens, pairs or queries), in nats."""
    accuracy: float | None
    """Fraction of the loss units that are correct, such as pairs that are ranked correctly. None if the objective has no accuracy."""
    max_replica_loss: float
    """Mean loss of the replica whose mean loss is highest, in nats; NaN if that of any replica is NaN."""
    update: OptimizerUpdate
    """Result of the optimizer's update: gradient norm, learning rates, loss scale."""
    stop_requested: bool
    """True if a stop was requested on any rank."""
    save_requested: bool = False
    """True if any rank requested a checkpoint."""
    non_finite_reason: str = ""
    """Which values were NaN/Inf, so that the step was skipped; empty if all values were finite."""

    @property
    def is_skipped(self) -> bool:
        """True if the step changed no parameters: gradients overflowed at the loss scale, or the loss or a gradient was NaN/Inf."""
        return self.update.skipped


def train_step(runtime: Runtime, model: ParallelModel, optimizer: Optimizer, data: TokenDataset, request: StepRequest) -> StepResult:
    """Run an optimizer step, and return its result. A step with a NaN/Inf loss or gradient changes no parameters."""
    return apply_gradients(model, optimizer, data, compute_gradients(runtime, model, optimizer, data, request), request)


def compute_gradients(
    runtime: Runtime, model: ParallelModel, optimizer: Optimizer, data: TokenDataset, request: StepRequest
) -> StepGradients:
    """Run the forward and backward passes of the requested step, and sum and clip its gradients. Collective: all ranks must call it."""
    topology, mesh = runtime.config.topology, model.mesh
    timer = request.timer
    timer.start_phase(DATA)
    batch, next_batch = build_batches(data, request, topology.samples_per_step)
    local_micro_batches, next_micro_batches = (
        each.select_micro_batches(mesh.micro_batches_per_replica, mesh.data_rank, topology.samples_per_micro_batch)
        for each in (batch, next_batch)
    )
    for _, ids in next_micro_batches:
        data.prefetch_samples(ids)  # read from the disk while this step is computed
    loss_token_count = max(1, batch.loss_denominator)  # the denominator is 0 if the loss mask excludes all tokens
    model.start_step(request.number)
    local_sums = run_forward_backward(
        runtime,
        model,
        data,
        local_micro_batches,
        next_micro_batches=next_micro_batches,
        step=request.number,
        scale_loss=lambda loss: optimizer.scale_loss(loss / loss_token_count),
        timer=timer,
    )
    model.sum_partial_gradients()
    with timer.time_phase(LOGGING):
        request.after_backward()
    timer.start_phase(OPTIMIZER)
    update = optimizer.prepare_step(request.number, *local_sums, check_results=request.check_results)
    return StepGradients(batch, local_micro_batches, update)


def apply_gradients(
    model: ParallelModel, optimizer: Optimizer, data: TokenDataset, gradients: StepGradients, request: StepRequest
) -> StepResult:
    """Update the parameters with the gradients of the requested step, unless they or the loss are NaN/Inf. Return the step's result.

    Collective: all ranks must call it. The last collective comes before the first parameter update: a rank that has completed it can finish
    the step without its peers. If a peer dies earlier, the state after the previous step is intact.
    """
    timer, update = request.timer, gradients.update
    timer.start_phase(COMMUNICATION)
    loss_sum, correct = update.extra_scalars
    replica_means = _build_replica_loss_means(model, data, gradients.micro_batches, loss_sum)
    (loss_sum, correct, *replica_means), (stop_requested, save_requested) = reduce_values_over_ranks(
        model, [loss_sum, correct, *replica_means], request.stop_flag.is_set, request.requests_save
    )
    loss_mean = loss_sum / gradients.loss_token_count
    timer.start_phase(OPTIMIZER)
    non_finite_reason = "" if update.skipped else describe_non_finite_values(loss_mean, update)
    if non_finite_reason:
        update = optimizer.skip_step()
        if model.gradient_compressor:
            model.gradient_compressor.reset_state()  # its error feedback may be NaN now
    timer.start_phase(OPTIMIZER)
    optimizer.step(request.number)
    timer.start_phase(OTHER)
    sample_ids = tuple(int(sample) for _, ids in gradients.micro_batches for sample in ids)
    return StepResult(
        request.number,
        sample_ids,
        gradients.batch.loss_tokens,
        loss_mean,
        get_accuracy(model, correct / gradients.loss_token_count),
        max(replica_means, key=lambda mean: (math.isnan(mean), mean)),
        update,
        stop_requested=stop_requested,
        save_requested=save_requested,
        non_finite_reason=non_finite_reason,
    )


def build_batches(data: TokenDataset, request: StepRequest, batch_size: int) -> tuple[GlobalBatch, GlobalBatch]:
    """Return the global batch of the requested step, and that of the step after it, whose samples are loaded ahead."""
    first = request.first_sample_position
    return request.batch or data.build_batch(first, batch_size), data.build_batch(first + batch_size, batch_size)


def count_validation_samples(config: Config, data: TokenDataset) -> int:
    """Return the number of samples of the validation data `data` that an evaluation uses."""
    return min(config.topology.samples_per_step * config.trainer.eval_iterations, len(data))


@torch.no_grad()
def evaluate_model(runtime: Runtime, model: ParallelModel, data: TokenDataset, stop_flag: StopFlag | None) -> ValidationResult | None:
    """Evaluate `model` on the first `eval_iterations` global batches of `data`, at most on each sample once, and return the result.

    Return None if `stop_flag` is given and a stop was requested on any rank during the evaluation.
    """
    loss, correct, loss_token_count = 0.0, 0.0, 0
    sample_count, batch_size = count_validation_samples(runtime.config, data), runtime.config.topology.samples_per_step
    for position in range(0, sample_count, batch_size):
        end = min(position + batch_size, sample_count)
        # If samples are compared with each other, the last batch also has earlier samples: each sample has equally many to compare with.
        start = max(0, end - batch_size) if isinstance(model.local_model.objective, EmbeddingObjective) else position
        batch, repeated_count = data.build_batch(start, end - start), position - start
        model.local_model.eval()
        local_sums = run_validation_forward(runtime, model, data, batch, repeated_count)
        model.local_model.train()
        (loss_sum, batch_correct), (stop_requested,) = reduce_values_over_ranks(
            model, [float(each) for each in local_sums], stop_flag is not None and stop_flag.is_set
        )
        if stop_requested:
            return None
        loss, correct = loss + loss_sum, correct + batch_correct
        loss_token_count += data.compute_loss_denominator(batch.ids[repeated_count:])
    loss_token_count = max(1, loss_token_count)
    return ValidationResult(loss / loss_token_count, get_accuracy(model, correct / loss_token_count))


def is_stop_requested(stop_flag: StopFlag) -> bool:
    """Return True on every rank if a stop was requested on any rank. Collective: all ranks must call it."""
    return collectives.all_reduce_sum([stop_flag.is_set])[0] > 0


def get_accuracy(model: ParallelModel, correct_fraction: float) -> float | None:
    return correct_fraction if model.local_model.objective.has_accuracy else None


def describe_non_finite_values(loss: float, update: OptimizerUpdate) -> str:
    """Return a description of the NaN/Inf loss or gradients of this step; empty if both are finite.

    Collective: all ranks must call it.
    """
    if math.isfinite(loss) and math.isfinite(update.gradient_norm):
        return ""
    return f"the loss is {loss:.4f}; {gradient_checks.describe_non_finite_gradients(update.non_finite_counts)}"


def reduce_values_over_ranks(model: ParallelModel, values: Sequence[float], *flags: bool) -> tuple[list[float], list[bool]]:
    """Return the sums of `values` over replicas, and for each of `flags` whether it is set on any rank."""
    has_loss = model.mesh.is_loss_rank  # tensor-parallel ranks have the same loss, and only the last pipeline stage has one
    sums = collectives.all_reduce_sum([*(value * has_loss for value in values), *flags])
    return sums[: len(values)], [flag > 0 for flag in sums[len(values) :]]


def _build_replica_loss_means(model: ParallelModel, data: TokenDataset, micro_batches: MicroBatches, loss_sum: float) -> list[float]:
    """Return the mean loss of this rank's replica as a list with one entry per replica.

    The entry of this rank's replica is computed from `loss_sum`; all other entries are 0, so that a sum over ranks gives all means.
    """
    means = [0.0] * model.mesh.data_size
    if loss_token_count := sum(data.compute_loss_denominator(ids) for _, ids in micro_batches):
        means[model.mesh.data_rank] = loss_sum / loss_token_count
    return means
