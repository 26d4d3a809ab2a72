"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): each rank has some of the attention heads, and a part of each MLP.

A layer's first projections are column-parallel: a rank computes some of their outputs. Its last projection is row-parallel: a rank computes
a partial sum of all outputs, and these are summed over ranks. So attention and MLP each need one collective in the forward pass, and one in
the backward pass, for the gradient of their input. With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) each rank has only
a part of the sequence between them: the two collectives become an all-gather and a reduce-scatter.

Parameters are plain tensors: this rank's shards. Of the gradients of some replicated parameters each rank computes only a part, from
its own heads, outputs or positions. These parts are summed once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional

from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.embedding_head import EmbeddingHead
from swarmtrain.trainer.model.layers import FunctionalLinear
from swarmtrain.trainer.model.mlp import Mlp, SwiGlu
from swarmtrain.trainer.model.peft import LoraAdapters
from swarmtrain.trainer.model.transformer import Transformer, TransformerBlock
from swarmtrain.trainer.model.umup import LinearFunction, UnitScaledLinear
from swarmtrain.trainer.parallel import differentiable_collectives
from swarmtrain.trainer.parallel.differentiable_collectives import RankGroup
from swarmtrain.trainer.parallel.vocabulary_parallel_loss import VocabularyParallelLoss

_SEQUENCE_DIM = 1
_COLUMN_PARALLEL_LAYERS, _ROW_PARALLEL_LAYERS = ("query", "key", "value", "up", "gate"), ("output", "down")
_PER_HEAD_MODULES = ("query_norm", "key_norm")
_PER_POSITION_MODULES = ("attention_norm", "mlp_norm", "norm", "positions", "down_projection", "up_projection")
"""Modules outside of attention and MLP. With sequence parallelism, their input has only this rank's positions."""

TensorFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorSharding:
    """How the parameters of a model are distributed over the tensor-parallel ranks. A parameter that is not named is replicated."""

    placements: Mapping[str, Placement] = field(default_factory=dict)
    """The placements of sharded parameters, by name."""
    partial_gradient_names: frozenset[str] = frozenset()
    """Names of the replicated parameters of whose gradients each rank computes a part."""


class VocabularyParallelEmbedding(nn.Module):
    """Token embedding of which each rank has some of the rows."""

    def __init__(self, shard: nn.Embedding, first_token: int, combine: TensorFunction) -> None:
        """`shard`: has the rows of the tokens from `first_token` on. `combine`: adds the ranks' embeddings."""
        super().__init__()
        self.weight, self.first_token, self._combine = shard.weight, first_token, combine

    def forward(self, tokens: Tensor) -> Tensor:
        local_tokens = tokens - self.first_token
        is_remote = (local_tokens < 0) | (local_tokens >= len(self.weight))
        embedded = functional.embedding(local_tokens.masked_fill(is_remote, 0), self.weight)
        return self._combine(embedded.masked_fill(is_remote.unsqueeze(-1), 0))


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> TensorSharding:
    """Shard `model` in place over the one-dimensional `mesh`, and return how.

    `sequence_parallel`: between attention and feed-forward blocks each rank has only a part of the sequence, whose length must be a
    multiple of the number of ranks.
    """
    if mesh.size() == 1:
        return TensorSharding()
    model.loss = VocabularyParallelLoss(mesh.get_group())
    model.model_coordinate = model.model_coordinate[0], mesh.get_local_rank()
    if sequence_parallel:
        model.sequence_parallel_coordinate = mesh.get_local_rank(), mesh.size()
    return _ModelSharder(model, mesh, sequence_parallel=sequence_parallel).shard_model()


def sum_partial_gradients(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum `gradients` over the ranks of `group`, in place and in one collective. Collective: all ranks of `group` must call it."""
    if not gradients:
        return
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    total = torch.cat([gradient.reshape(-1) for gradient in local])
    dist.all_reduce(total, group=group)
    for gradient, part in zip(local, torch.split(total, [gradient.numel() for gradient in local]), strict=True):
        gradient.copy_(part.view_as(gradient))


class _ModelSharder:
    """Shards the modules of a model."""

    def __init__(self, model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self._placements: dict[str, Placement] = {}
        self._partial_gradient_names: set[str] = set()
        self._model, self._rank, self._size = model, mesh.get_local_rank(), mesh.size()
        self._group = RankGroup.from_process_group(mesh.get_group())
        self._sequence_parallel = sequence_parallel
        self._names = {module: name for name, module in model.named_modules()}
        self._custom_modules = {
            module
            for block in model.blocks
            if isinstance(block, TransformerBlock) and not isinstance(block.mlp, Mlp | SwiGlu)
            for module in block.mlp.modules()
        }
        """The modules of custom feed-forward blocks."""
        self._enter, self._leave = (
            (
                partial(differentiable_collectives.gather_parts, group=self._group, dim=_SEQUENCE_DIM),
                partial(differentiable_collectives.sum_and_divide, group=self._group, dim=_SEQUENCE_DIM),
            )
            if sequence_parallel
            else (
                partial(differentiable_collectives.sum_gradients, group=self._group),
                partial(differentiable_collectives.sum_over_ranks, group=self._group),
            )
        )

    def shard_model(self) -> TensorSharding:
        """Shard all modules that are on this rank. Modules of other pipeline stages and custom feed-forward blocks are not sharded."""
        for module in list(self._model.modules()):
            if isinstance(module, Attention):
                module.first_head = self._rank * (self._model.architecture.num_attention_heads // self._size)
            if isinstance(module, TransformerBlock):
                if isinstance(module.attention, Attention):
                    module.prepare_attention_input = self._enter
                if isinstance(module.mlp, Mlp | SwiGlu):
                    module.prepare_mlp_input = self._enter
            if isinstance(module, Attention | Mlp | SwiGlu):
                self._shard_layers(module)
                self._shard_lora(module.lora)
            if self._has_partial_gradient(module):
                self._add_partial_gradients(module, *(name for name, _ in module.named_parameters(recurse=False)))
        self._shard_vocabulary()
        return TensorSharding(self._placements, frozenset(self._partial_gradient_names))

    def _shard_layers(self, module: Attention | Mlp | SwiGlu) -> None:
        for name, layer in module.named_children():
            if name in _COLUMN_PARALLEL_LAYERS:
                self._shard_parameters(layer, {"weight": 0, "bias": 0})
            elif name in _ROW_PARALLEL_LAYERS and isinstance(layer, FunctionalLinear | UnitScaledLinear):
                self._shard_parameters(layer, {"weight": 1})
                layer.multiply = partial(_multiply_row_parallel, layer.multiply, self._leave)
                if self._sequence_parallel and layer.bias is not None:
                    self._add_partial_gradients(layer, "bias")

    def _shard_lora(self, adapters: LoraAdapters) -> None:
        for name, lora in adapters.by_layer.items():
            if name in _COLUMN_PARALLEL_LAYERS:
                # A has the same output on all ranks; its gradient is that of this rank's outputs of B.
                self._add_partial_gradients(lora.a, "weight")
                self._shard_parameters(lora.b, {"weight": 0})
            else:
                lora.dropout.first_dimension = self._rank * lora.a.in_features // self._size
                self._shard_parameters(lora.a, {"weight": 1})
                lora.a.register_forward_hook(partial(_transform_output, self._leave))
                if self._sequence_parallel:
                    self._add_partial_gradients(lora.b, "weight")

    def _shard_vocabulary(self) -> None:
        embedding, head = self._model.embedding, self._model.head
        if isinstance(embedding, nn.Embedding):
            self._shard_parameters(embedding, {"weight": 0})
            first_token = self._rank * len(embedding.weight)
            self._model.embedding = VocabularyParallelEmbedding(embedding, first_token, self._leave)
        if isinstance(head, EmbeddingHead):
            if self._sequence_parallel:  # the head is not sharded
                gather = differentiable_collectives.gather_parts
                enter = partial(gather, group=self._group, dim=_SEQUENCE_DIM, replicated_rank=self._rank)
                head.register_forward_pre_hook(partial(_transform_first_input, enter))
        elif isinstance(head, nn.Linear):
            head.register_forward_pre_hook(partial(_transform_first_input, self._enter))
            if self._model.has_tied_embeddings and isinstance(embedding, nn.Embedding):
                head.weight = embedding.weight
            else:
                self._shard_parameters(head, {"weight": 0})

    def _shard_parameters(self, module: nn.Module, dimensions: dict[str, int]) -> None:
        """Replace parameters of `module`, by name, with this rank's shards along the given dimensions."""
        for name, dim in dimensions.items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                shard = parameter.detach().chunk(self._size, dim)[self._rank]
                setattr(module, name, nn.Parameter(shard.clone(), requires_grad=parameter.requires_grad))
                self._placements[f"{self._names[module]}.{name}"] = Shard(dim)

    def _add_partial_gradients(self, module: nn.Module, *names: str) -> None:
        self._partial_gradient_names.update(f"{self._names[module]}.{name}" for name in names)

    def _has_partial_gradient(self, module: nn.Module) -> bool:
        """Return whether each rank computes only a part of the gradients of the replicated `module`."""
        name = self._names.get(module, "").rpartition(".")[2]
        is_per_position = name in _PER_POSITION_MODULES or module in self._custom_modules
        return name in _PER_HEAD_MODULES or (self._sequence_parallel and is_per_position)


def _multiply_row_parallel(multiply: LinearFunction, combine: TensorFunction, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = combine(multiply(input, weight, None))
    return output if bias is None else output + bias


def _transform_first_input(transform: TensorFunction, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return transform(inputs[0]), *inputs[1:]


def _transform_output(transform: TensorFunction, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return transform(output)
