"""Pipeline parallelism: torch's pipeline stages and schedules over the mesh's pipe group.

Modules that a rank does not hold are replaced by a placeholder that returns its input. So the remaining modules keep their names, and a
stage runs the forward pass of the full model. Only the first stage receives tokens, all others receive hidden states; only the last stage
returns a loss, all others return hidden states.

Gradients are summed over replicas after the last backward pass, when a pipeline rank is idle while earlier stages drain. They are summed
in a higher precision (see ddp.py). If replicas shard their state (see fsdp.py), each stage gathers its
parameters once per step and keeps them until its last backward pass: an all-gather per micro batch would make all stages wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from swarmtrain.config import Config
from swarmtrain.config.pipeline_layout import count_scheduled_micro_batches, partition_layers
from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.data.token_batch import TokenBatch
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import activation_checkpointing
from swarmtrain.trainer.parallel.fsdp import FsdpParameters, Materializer
from swarmtrain.trainer.parallel.gradient_compression import GradientCompressor, build_gradient_compressor
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.working_weights import GradientSums, WorkingWeights, get_sum_dtype, get_working_dtype

PassContextFactory = Callable[[int, int], AbstractContextManager[object]]
"""Returns the context manager for one forward or backward pass, given the micro batch's index in the replica and the stage's index."""
LossTransform = Callable[[Tensor], Tensor]
"""Maps a summed loss to the value that is differentiated."""
_StageLossFunction = Callable[[Tensor, Tensor], Tensor]
"""Computes the value that is differentiated, from the last stage's output and its target."""


def remove_remote_layers(model: Transformer, config: Config, mesh: Mesh) -> None:
    """Replace the modules of `model` that other ranks of the pipeline hold, in place, with placeholders."""
    stages = partition_layers(config.topology, config.transformer_architecture)
    local_stages = stages[mesh.pipe_rank :: mesh.pipe_size]
    _keep_layers(model, {layer for layers in local_stages for layer in layers})


class PipelineModel:
    """The pipeline stages of this rank, as one model. Gradients are summed over replicas."""

    def __init__(
        self,
        model: Transformer,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        *,
        materialize_shards: Materializer | None,
        tied_parameter_index: int | None,
    ) -> None:
        """Create the pipeline stages of `model`, which contains only this rank's layers.

        `materialize_shards`: function that materializes parameters, if replicas shard the model's state; None if `model` is already
        materialized. `tied_parameter_index`: index of the parameter that has a tied copy at the other end of the pipeline; None if no
        parameter has one.
        """
        self._mesh, self._device = mesh, device
        topology, architecture = config.topology, config.transformer_architecture
        micro_batch_count = count_scheduled_micro_batches(topology, mesh.micro_batches_per_replica[mesh.data_rank])
        micro_batch_rows = topology.samples_per_micro_batch * config.data.rows_per_sample
        self._scheduled_rows = micro_batch_count * micro_batch_rows
        local_stages = list(enumerate(partition_layers(topology, architecture)))[mesh.pipe_rank :: mesh.pipe_size]
        self._parameter_store: FsdpParameters | _ReplicatedParameters
        if materialize_shards is None:
            self._parameter_store = _ReplicatedParameters(model, config, mesh, tied_parameter_index)
        stage_models = [_build_stage_model(model, layers) for _, layers in local_stages]
        if materialize_shards is not None:
            self._parameter_store = FsdpParameters(model, stage_models, config, mesh, materialize_shards, keep_gathered=True)
        self._tied_parameter = (
            self._parameter_store.parameters[tied_parameter_index] if materialize_shards and tied_parameter_index is not None else None
        )
        for stage_model in stage_models:
            activation_checkpointing.checkpoint_stage(stage_model, topology.activation_checkpointing_type)
        self._stages = [
            _build_pipeline_stage(
                stage_model, index, topology, architecture, rows_per_micro_batch=micro_batch_rows, mesh=mesh, device=device
            )
            for stage_model, (index, _) in zip(stage_models, local_stages, strict=True)
        ]
        for stage in self._stages:
            stage.replicated_parameters = None if isinstance(self._parameter_store, FsdpParameters) else self._parameter_store
        if len(self._stages) == 1:
            self._schedule: Any = Schedule1F1B(self._stages[0], micro_batch_count, self._compute_stage_loss, scale_grads=False)
        else:
            self._schedule = ScheduleInterleaved1F1B(list(self._stages), micro_batch_count, self._compute_stage_loss, scale_grads=False)
        self._loss_function: _StageLossFunction = _return_output
        self._outputs: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters or shards, in the order of the model's parameters."""
        return self._parameter_store.parameters

    @property
    def compressor(self) -> GradientCompressor | None:
        """Compression of gradients over replicas; None for exact sums."""
        return self._parameter_store.compressor if isinstance(self._parameter_store, _ReplicatedParameters) else None

    def run_forward_backward(
        self,
        batch: TokenBatch,
        scale_loss: LossTransform,
        forward_context: PassContextFactory,
        backward_context: PassContextFactory,
        vector_gradients: Tensor | None = None,
    ) -> Tensor:
        """Run the forward and backward passes of `batch`, this replica's samples of one step.

        Return the unscaled loss summed over the samples, in float64; 0 on a rank without the last stage, and if `vector_gradients` is
        given. Afterwards, the parameters of every rank have the gradient of the loss summed over all replicas and scaled by `scale_loss`.
        `vector_gradients`: gradients of the loss with respect to the vectors that the last stage computes from `batch`
        (EmbeddingObjective).
        """
        if vector_gradients is None:
            losses = self._run_schedule(self._schedule.step, batch, lambda loss, _: scale_loss(loss), (forward_context, backward_context))
        else:
            self._run_schedule(
                self._schedule.step,
                batch,
                lambda vectors, pull: scale_loss((vectors * pull).sum()),
                (forward_context, backward_context),
                vector_gradients,
            )
            losses = []
        self._parameter_store.finalize_gradients()
        if self._tied_parameter is not None and self._tied_parameter.grad is not None:
            self._tied_parameter.grad = _sum_with_tied_copy(self._tied_parameter.grad, self._mesh)
        return self._sum_losses(losses)

    def evaluate_loss(self, batch: TokenBatch, forward_context: PassContextFactory) -> Tensor:
        """Return the loss summed over `batch`, in float64; 0 on a rank without the last stage."""
        return self._sum_losses(self._run_schedule(self._schedule.eval, batch, _return_output, (forward_context, forward_context)))

    def compute_embeddings(self, batch: TokenBatch, forward_context: PassContextFactory) -> Tensor | None:
        """Return the last stage's output embedding for each row of `batch`; None on a rank without the last stage."""
        outputs = self._run_schedule(self._schedule.eval, batch, _return_output, (forward_context, forward_context))
        return torch.cat(outputs)[: len(batch.inputs)] if outputs else None

    def _run_schedule(
        self,
        run_schedule: Callable[..., object],
        batch: TokenBatch,
        loss_function: _StageLossFunction,
        contexts: tuple[PassContextFactory, PassContextFactory],
        schedule_targets: Tensor | None = None,
    ) -> list[Tensor]:
        """Run a pipeline schedule over `batch`.

        Return the last stage's output for each micro batch; empty on a rank without the last stage.
        `loss_function` computes the value to differentiate. `contexts`: context managers for forward and backward passes.
        `schedule_targets`: passed to `loss_function` instead of the targets of `batch`.
        """
        self._loss_function, self._outputs = loss_function, []
        for stage in self._stages:
            stage.forward_context, stage.backward_context = contexts
        inputs = (self._pad_rows(batch.inputs, 0),) if self._stages[0].is_first else ()
        kwargs = {} if batch.document_ids is None else {"documents": self._pad_rows(batch.document_ids, 0)}
        if self._stages[-1].is_last:
            kwargs["targets"] = self._pad_rows(batch.targets, IGNORE_INDEX)
            kwargs["target"] = kwargs["targets"] if schedule_targets is None else self._pad_rows(schedule_targets, 0)
        try:
            run_schedule(*inputs, return_outputs=False, **kwargs)
        except RuntimeError as error:  # torch's message only names stage and arguments; the cause is the actual error
            raise error.__cause__ or error from None
        return self._outputs

    def _sum_losses(self, losses: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(losses)).double().sum() if losses else torch.zeros((), dtype=torch.float64, device=self._device)

    def _pad_rows(self, rows: Tensor, padding_value: int) -> Tensor:
        """Return `rows` padded to the number of samples that the schedule requires; padding rows are filled with `padding_value`."""
        padded = torch.full((self._scheduled_rows, rows.shape[1]), padding_value, dtype=rows.dtype, device=self._device)
        padded[: len(rows)] = rows
        return padded

    def _compute_stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._outputs.append(output.detach())
        return self._loss_function(output, target)


class _HookedStage(PipelineStage):
    """A pipeline stage that runs each pass in a given context manager, and accumulates gradients after each backward pass."""

    forward_context: PassContextFactory
    backward_context: PassContextFactory
    replicated_parameters: _ReplicatedParameters | None = None
    """Accumulates the gradients; None if fully_shard does."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        if self.has_backward:  # torch 2.11 does not set this if the first schedule that it ran was an evaluation
            for received in self.args_recv_info.get(fwd_chunk_id, ()):
                if isinstance(buffer := getattr(received, "buffer", None), Tensor):
                    buffer.requires_grad_()
        with self.forward_context(fwd_chunk_id, self.stage_index):
            return super().forward_one_chunk(fwd_chunk_id, args, self._drop_unused_targets(kwargs or {}), save_forward_output)

    def _drop_unused_targets(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs`, without targets unless this is the last stage: only the last stage computes a loss."""
        return {name: value for name, value in kwargs.items() if self.is_last or name != "targets"}

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        with self.backward_context(bwd_chunk_id, self.stage_index):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
            if self.replicated_parameters:
                self.replicated_parameters.accumulate_gradients(self.submod.parameters())


class _ReplicatedParameters:
    """Parameters that every replica holds completely. Sums their gradients over micro batches and replicas."""

    def __init__(self, model: Transformer, config: Config, mesh: Mesh, tied_parameter_index: int | None) -> None:
        """Prepare to sum the gradients of `model` over the replicas in `mesh`.

        `tied_parameter_index`: index of the parameter that has a tied copy at the other end of the pipeline; None if no parameter has one.
        """
        self._mesh, self._weights = mesh, WorkingWeights(model)
        sum_dtype = get_sum_dtype(model.architecture.precision)
        self._sums = GradientSums(self._weights, sum_dtype) if sum_dtype else None
        group = mesh.data_parallel_group
        self.compressor = build_gradient_compressor(config, dict(model.named_parameters()), group) if group.size() > 1 else None
        self._tied_weight = None if tied_parameter_index is None else self._weights.weights[tied_parameter_index]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of the model's parameters."""
        return self._weights.parameters

    def accumulate_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Add the gradients that a micro batch has computed for `weights` to their sums.

        A no-op if they are summed in their own type: autograd then accumulates the gradients.
        """
        if self._sums:
            for weight in weights:
                self._sums.add_gradient(weight)

    def finalize_gradients(self) -> None:
        """Sum the gradients over all replicas, and store the results as the parameters' gradients."""
        totals: dict[Tensor, Tensor] = {}
        for weight in self._weights.weights:
            total = self._sums.take_sum(weight) if self._sums else weight.grad
            if total is not None:
                totals[weight] = total
        group = self._mesh.data_parallel_group
        if self.compressor and self.compressor.is_active:
            self.compressor.start_sum(totals)
            self.compressor.finish_sums()
        elif group.size() > 1:
            for work in [dist.all_reduce(total, group=group, async_op=True) for total in totals.values()]:
                work.wait()
        if self._tied_weight in totals:
            totals[self._tied_weight] = _sum_with_tied_copy(totals[self._tied_weight], self._mesh)
        for summed_weight, total in totals.items():
            parameter = self._weights.get_parameter(summed_weight)
            parameter.grad = total.to(parameter.dtype)


def _sum_with_tied_copy(gradient: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of `gradient` and the gradient of the tied copy at the other end of the pipeline.

    Both ends compute the same sum, so the two copies stay bitwise equal.
    """
    local_gradient = gradient.contiguous()
    remote_gradient = torch.empty_like(local_gradient)
    group = mesh.pipe_group
    peer = dist.get_global_rank(group, mesh.pipe_size - 1 - mesh.pipe_rank)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, local_gradient, peer, group), dist.P2POp(dist.irecv, remote_gradient, peer, group)]
    ):
        work.wait()
    return local_gradient + remote_gradient


class _RemoteStagePlaceholder(nn.Module):
    """Placeholder for a module that another rank holds: returns its input."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden


def _return_output(output: Tensor, _: Tensor) -> Tensor:
    return output


def _keep_layers(model: Transformer, layers: Collection[int]) -> None:
    """Replace all layers of `model`, except those with indices in `layers`, with placeholders.

    The embedding is kept with the first layer, the head with the last.
    """
    has_first, has_last = 0 in layers, len(model.blocks) - 1 in layers
    remote_modules = [f"blocks.{layer}" for layer in range(len(model.blocks)) if layer not in layers]
    remote_modules += [] if has_first else ["embedding", "embedding_dropout"]
    remote_modules += [] if has_last else ["norm", "head"]
    for name in remote_modules:
        model.set_submodule(name, _RemoteStagePlaceholder())
    if not has_first:
        model.positions = None
    model.has_tied_embeddings = model.has_tied_embeddings and has_first and has_last
    model.model_coordinate = min(layers), model.model_coordinate[1]


def _build_stage_model(model: Transformer, layers: Collection[int]) -> Transformer:
    """Return a view of `model` that has only `layers`; it shares their parameters with `model`."""
    stage_model = copy.copy(model)
    # The view has its own dicts of modules and hooks, because fully_shard registers hooks on each view.
    vars(stage_model).update({name: copy.copy(value) for name, value in vars(model).items() if isinstance(value, dict)})
    stage_model.blocks = nn.ModuleList(model.blocks)
    _keep_layers(stage_model, layers)
    return stage_model


def _build_pipeline_stage(
    stage_model: Transformer,
    stage_index: int,
    topology: TopologyConfig,
    architecture: TransformerArchitectureConfig,
    *,
    rows_per_micro_batch: int,
    mesh: Mesh,
    device: torch.device,
) -> _HookedStage:
    """Return the pipeline stage with index `stage_index`, for micro batches of `rows_per_micro_batch` rows.

    Input and output shapes are set explicitly; otherwise torch would run an extra forward pass to infer them.
    """
    length = architecture.sequence_length
    tokens = torch.empty((rows_per_micro_batch, length), dtype=torch.int64, device="meta")
    local_sequence_length = length // topology.context_parallel_size // (topology.tensor_parallel_size if topology.sequence_parallel else 1)
    hidden = torch.empty(
        (rows_per_micro_batch * stage_model.objective.copies_per_row, local_sequence_length, architecture.hidden_size),
        dtype=get_working_dtype(architecture.precision) or next(stage_model.parameters()).dtype,
        device="meta",
        requires_grad=True,
    )
    final_shape = () if architecture.embedding_size is None else (rows_per_micro_batch, architecture.embedding_size)
    final_output = torch.empty(final_shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device="meta", requires_grad=True)
    stage_input, stage_output = (
        tokens if stage_index == 0 else hidden,
        final_output if stage_index == topology.pipeline_stage_count - 1 else hidden,
    )
    return _HookedStage(
        stage_model,
        stage_index,
        topology.pipeline_stage_count,
        device,
        input_args=stage_input,
        output_args=stage_output,
        group=mesh.pipe_group,
    )
