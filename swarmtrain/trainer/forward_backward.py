"""Forward and backward passes of this rank's micro batches of one step, and forward passes for the validation loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.data.token_batch import TokenBatch
from swarmtrain.trainer.health.step_timer import BACKWARD, DATA, FORWARD, StepTimer
from swarmtrain.trainer.model import dropout
from swarmtrain.trainer.model.objective import EmbeddingLoss, EmbeddingObjective
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.pipeline_parallel import LossTransform, PipelineModel
from swarmtrain.trainer.random_seeds import derive_seed, seed_everything
from swarmtrain.trainer.runtime import Runtime

MicroBatches = Sequence[tuple[int, Ids]]
"""The micro batches of one replica: for each, its index in the global batch and the ids of its samples."""
_PaddedMicroBatch = tuple[int, Ids | None]
"""A micro batch. One without ids consists of padding."""
_EMPTY_MICRO_BATCH: _PaddedMicroBatch = (0, None)


def run_forward_backward(
    runtime: Runtime,
    model: ParallelModel,
    data: TokenDataset,
    micro_batches: MicroBatches,
    *,
    next_micro_batches: MicroBatches,
    step: int,
    scale_loss: LossTransform,
    timer: StepTimer,
) -> tuple[Tensor, Tensor]:
    """Run the forward and backward passes of this rank's micro batches in step `step`, and accumulate the gradients of the loss.

    `next_micro_batches`: those of the next step, the first of which are loaded meanwhile. The loss is scaled by `scale_loss` before the
    backward pass. Return the unscaled loss summed over the micro batches, in nats, and the number of correct loss units (see
    Objective.pop_correct_count; 0 if the objective does not count them).
    """
    forward = partial(_prepare_forward, runtime, step, timer)
    vector_loss = _compute_embedding_loss(
        runtime, model, data, micro_batches, forward, global_batch_size=runtime.config.topology.samples_per_step
    )
    if isinstance(model.wrapped_model, PipelineModel):
        first_micro_batch = micro_batches[0][0] if micro_batches else 0
        rows = _load_all_micro_batches(runtime, data, micro_batches)
        data.start_loading(_concatenate_ids(next_micro_batches))
        timer.start_phase(BACKWARD)  # a stage that waits for other stages counts as backward
        loss = model.wrapped_model.run_forward_backward(
            rows,
            scale_loss,
            lambda index, stage: forward(first_micro_batch + index, stage),
            lambda index, stage: timer.time_phase(BACKWARD, first_micro_batch + index, stage),
            vector_loss.vector_gradients if vector_loss else None,
        )
        return _get_loss_and_correct_count(model, vector_loss, loss)
    loss_sum = torch.zeros((), dtype=torch.float64, device=runtime.device)
    padded = _pad_micro_batches(micro_batches, model.wrapped_model.micro_batches_per_step)
    following = _pad_micro_batches(next_micro_batches, model.wrapped_model.micro_batches_per_step)[0]
    for index, (micro_batch, rows) in enumerate(_load_micro_batches(runtime, data, padded, following, timer)):
        with model.wrapped_model.accumulate_micro_batch_gradients(is_last=index == len(padded) - 1):
            with forward(micro_batch):
                output: Tensor = model.wrapped_model(*rows)
                loss = (output * vector_loss.select_micro_batch_gradients(index, len(output))).sum() if vector_loss else output
            timer.start_phase(BACKWARD, micro_batch)
            torch.autograd.backward(scale_loss(loss))
        loss_sum += loss.detach()
    return _get_loss_and_correct_count(model, vector_loss, loss_sum)


def _get_loss_and_correct_count(model: ParallelModel, vector_loss: EmbeddingLoss | None, loss_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss, and the number of correct loss units (0 if the objective does not count them).

    `loss_sum`: sum of the model's outputs, which is the loss unless the objective compares vectors.
    """
    if vector_loss:
        return vector_loss.loss, vector_loss.correct_count
    correct = model.local_model.objective.pop_correct_count()
    return loss_sum, loss_sum.new_zeros(()) if correct is None else correct


def _compute_embedding_loss(
    runtime: Runtime,
    model: ParallelModel,
    data: TokenDataset,
    micro_batches: MicroBatches,
    prepare_forward: Callable[..., AbstractContextManager[object]],
    *,
    global_batch_size: int,
    first_counted_sample: int = 0,
) -> EmbeddingLoss | None:
    """Return the vector loss of this replica's samples (see EmbeddingObjective).

    The samples' vectors are computed without gradients, and compared with all vectors of the global batch. Return None if the objective
    does not compare vectors, or if this rank has no vectors (a pipeline rank without the last stage). `prepare_forward` takes the index of
    the micro batch in the global batch, and with pipeline parallelism also the index of the stage. It returns the context manager for that
    forward pass. `first_counted_sample`: see EmbeddingObjective.compute_embedding_loss.
    """
    objective, topology = model.local_model.objective, runtime.config.topology
    if not isinstance(objective, EmbeddingObjective):
        return None
    first = micro_batches[0][0] if micro_batches else 0
    with torch.no_grad():
        if isinstance(model.wrapped_model, PipelineModel):
            local_vectors = model.wrapped_model.compute_embeddings(
                _load_all_micro_batches(runtime, data, micro_batches), lambda index, stage: prepare_forward(first + index, stage)
            )
        else:
            vectors = []
            padded = _pad_micro_batches(micro_batches, model.wrapped_model.micro_batches_per_step)
            for index, (micro_batch, rows) in enumerate(_load_micro_batches(runtime, data, padded, padded[0])):
                sample_count = len(micro_batches[index][1]) if index < len(micro_batches) else 0  # the other rows are padding
                with prepare_forward(micro_batch):
                    vectors.append(model.local_model(*rows)[: sample_count * data.rows_per_sample])
            local_vectors = torch.cat(vectors)
    if local_vectors is None:
        return None
    return objective.compute_embedding_loss(
        local_vectors,
        rows_per_sample=data.rows_per_sample,
        first_sample=first * topology.samples_per_micro_batch,
        global_batch_size=global_batch_size,
        group=model.mesh.data_parallel_group,
        first_counted_sample=first_counted_sample,
    )


def run_validation_forward(
    runtime: Runtime, model: ParallelModel, data: TokenDataset, batch: GlobalBatch, repeated_count: int
) -> tuple[Tensor, Tensor]:
    """Run the forward passes of this rank's micro batches of `batch` for the validation loss.

    Return the loss summed over the micro batches, in nats, and the number of correct loss units (0 if the objective does not count them).
    The first `repeated_count` samples of `batch` are not counted, since an earlier batch has counted them: the objective must be an
    EmbeddingObjective then.
    """
    mesh, micro_batch_size = model.mesh, runtime.config.topology.samples_per_micro_batch
    micro_batches = batch.select_micro_batches(mesh.evaluation_micro_batches_per_replica, mesh.replica_rank, micro_batch_size)
    loss_sum = torch.zeros((), dtype=torch.float64, device=runtime.device)
    if isinstance(model.local_model.objective, EmbeddingObjective):
        vector_loss = _compute_embedding_loss(
            runtime,
            model,
            data,
            micro_batches,
            lambda *_: nullcontext(),
            global_batch_size=len(batch.ids),
            first_counted_sample=repeated_count,
        )
        return _get_loss_and_correct_count(model, vector_loss, loss_sum)
    if isinstance(model.wrapped_model, PipelineModel):
        return _get_loss_and_correct_count(
            model,
            None,
            model.wrapped_model.evaluate_loss(_load_all_micro_batches(runtime, data, micro_batches), lambda *_: nullcontext()),
        )
    padded = _pad_micro_batches(micro_batches, model.wrapped_model.micro_batches_per_step)
    for _, rows in _load_micro_batches(runtime, data, padded):
        loss_sum += model.local_model(*rows)
    return _get_loss_and_correct_count(model, None, loss_sum)


def _pad_micro_batches(micro_batches: MicroBatches, count: int) -> Sequence[_PaddedMicroBatch]:
    """Return `micro_batches`, padded with empty ones to `count` micro batches: all replicas must run the same number."""
    return [*micro_batches, *[_EMPTY_MICRO_BATCH] * (count - len(micro_batches))]


def _concatenate_ids(micro_batches: MicroBatches) -> Ids:
    return np.concatenate([np.empty(0, dtype=np.int64), *(ids for _, ids in micro_batches)])


def _load_all_micro_batches(runtime: Runtime, data: TokenDataset, micro_batches: MicroBatches) -> TokenBatch:
    return _copy_batch_to_device(runtime, data.load_samples(_concatenate_ids(micro_batches)))


def _load_micro_batches(
    runtime: Runtime,
    data: TokenDataset,
    micro_batches: Sequence[_PaddedMicroBatch],
    following: _PaddedMicroBatch = _EMPTY_MICRO_BATCH,
    timer: StepTimer | None = None,
) -> Iterator[tuple[int, TokenBatch]]:
    """Yield the index in the global batch of each of `micro_batches`, and its samples on the device.

    While one micro batch is used, the next is loaded in a thread; `following` is the one after the last.
    """
    for (index, ids), (_, next_ids) in pairwise((*micro_batches, following)):
        if timer:
            timer.start_phase(DATA)
        batch = data.build_empty_sample() if ids is None else data.load_samples(ids)
        if next_ids is not None:
            data.start_loading(next_ids)
        if ids is not None and (missing_count := runtime.config.topology.samples_per_micro_batch - len(ids)):
            batch = batch.append([data.build_empty_sample()] * missing_count)  # of the same shape, for which the model is compiled
        yield index, _copy_batch_to_device(runtime, batch)


def _copy_batch_to_device(runtime: Runtime, batch: TokenBatch) -> TokenBatch:
    """Return a copy of `batch` on the device.

    On CUDA the source is pinned memory: a copy from pageable memory waits for all queued work.
    """
    pinned = batch.map_tensors(Tensor.pin_memory) if runtime.device.type == "cuda" else batch
    return pinned.map_tensors(lambda tensor: tensor.to(runtime.device, non_blocking=True))


@contextmanager
def _prepare_forward(runtime: Runtime, step: int, timer: StepTimer, micro_batch: int, *stage: int) -> Iterator[None]:
    """Context manager that times the forward pass of a micro batch in step `step`, and sets random seeds for it.

    `micro_batch`: index in the global batch. `stage`: index of the pipeline stage, with pipeline parallelism only.
    """
    with (
        timer.time_phase(FORWARD, micro_batch, *stage),
        dropout.seed_dropout(
            derive_seed(runtime.config.trainer.seed, step),
            micro_batch * runtime.config.topology.samples_per_micro_batch * runtime.config.data.rows_per_sample,
        ),
    ):
        seed_everything(runtime.config.trainer.seed, step, micro_batch)
        yield
