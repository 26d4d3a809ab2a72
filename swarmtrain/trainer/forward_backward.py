"""Forward and backward passes of this rank's micro batches of one step, and forward passes for the validation loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.samples import TokenDataset
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


def run_forward_backward(
    runtime: Runtime,
    model: ParallelModel,
    data: TokenDataset,
    micro_batches: MicroBatches,
    *,
    step: int,
    scale_loss: LossTransform,
    timer: StepTimer,
) -> tuple[Tensor, Tensor]:
    """Run the forward and backward passes of this rank's micro batches in step `step`, and accumulate the gradients of the loss.

    The loss is scaled by `scale_loss` before the backward pass. Return the unscaled loss summed over the micro batches, in nats, and the
    number of correct loss units (see Objective.pop_correct_count; 0 if the objective does not count them).
    """
    forward = partial(_prepare_forward, runtime, step, timer)
    vector_loss = _compute_embedding_loss(runtime, model, data, micro_batches, forward)
    if isinstance(model.wrapped_model, PipelineModel):
        first_micro_batch = micro_batches[0][0] if micro_batches else 0
        rows = _load_all_micro_batches(runtime, data, micro_batches)
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
    for index, (micro_batch, ids) in enumerate(padded):
        with model.wrapped_model.accumulate_micro_batch_gradients(is_last=index == len(padded) - 1):
            timer.start_phase(DATA)
            rows = _load_micro_batch(runtime, data, ids)
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
) -> EmbeddingLoss | None:
    """Return the vector loss of this replica's samples (see EmbeddingObjective).

    The samples' vectors are computed without gradients, and compared with all vectors of the global batch. Return None if the objective
    does not compare vectors, or if this rank has no vectors (a pipeline rank without the last stage). `prepare_forward` takes the index of
    the micro batch in the global batch, and with pipeline parallelism also the index of the stage. It returns the context manager for that
    forward pass.
    """
    objective, topology, mesh = model.local_model.objective, runtime.config.topology, model.mesh
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
            for micro_batch, ids in _pad_micro_batches(micro_batches, model.wrapped_model.micro_batches_per_step):
                rows = _load_micro_batch(runtime, data, ids)
                with prepare_forward(micro_batch):
                    vectors.append(model.local_model(*rows)[: 0 if ids is None else None])
            local_vectors = torch.cat(vectors)
    if local_vectors is None:
        return None
    first = sum(mesh.micro_batches_per_replica[: mesh.data_rank]) * topology.samples_per_micro_batch
    return objective.compute_embedding_loss(
        local_vectors,
        rows_per_sample=data.rows_per_sample,
        first_sample=first,
        global_batch_size=topology.samples_per_step,
        group=mesh.data_parallel_group,
    )


def run_validation_forward(
    runtime: Runtime, model: ParallelModel, data: TokenDataset, micro_batches: MicroBatches
) -> tuple[Tensor, Tensor]:
    """Run the forward passes of this rank's micro batches for the validation loss.

    Return the loss summed over the micro batches, in nats, and the number of correct loss units (0 if the objective does not count them).
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=runtime.device)
    if isinstance(model.local_model.objective, EmbeddingObjective):
        vector_loss = _compute_embedding_loss(runtime, model, data, micro_batches, lambda *_: nullcontext())
        return _get_loss_and_correct_count(model, vector_loss, loss_sum)
    if isinstance(model.wrapped_model, PipelineModel):
        return _get_loss_and_correct_count(
            model,
            None,
            model.wrapped_model.evaluate_loss(_load_all_micro_batches(runtime, data, micro_batches), lambda *_: nullcontext()),
        )
    for _, ids in _pad_micro_batches(micro_batches, model.wrapped_model.micro_batches_per_step):
        rows = _load_micro_batch(runtime, data, ids)
        loss_sum += model.local_model(*rows)
    return _get_loss_and_correct_count(model, None, loss_sum)


def _pad_micro_batches(micro_batches: MicroBatches, count: int) -> Sequence[tuple[int, Ids | None]]:
    """Return `micro_batches`, padded with empty ones to `count` micro batches: all replicas must run the same number."""
    return [*micro_batches, *[(0, None)] * (count - len(micro_batches))]


def _load_all_micro_batches(runtime: Runtime, data: TokenDataset, micro_batches: MicroBatches) -> TokenBatch:
    return _copy_batch_to_device(
        runtime, data.load_samples(np.concatenate([np.empty(0, dtype=np.int64), *(ids for _, ids in micro_batches)]))
    )


def _load_micro_batch(runtime: Runtime, data: TokenDataset, sample_ids: Ids | None) -> TokenBatch:
    return _copy_batch_to_device(runtime, data.build_empty_sample() if sample_ids is None else data.load_samples(sample_ids))


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
