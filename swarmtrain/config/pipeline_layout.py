"""Pipeline parallelism: partition the layers into stages, count scheduled micro batches, compute the bubble. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from swarmtrain.config.schema.section import build_field_error
from swarmtrain.config.schema.topology import PipePartitionMethod, TopologyConfig
from swarmtrain.config.schema.transformer_architecture import MlpType, TransformerArchitectureConfig


def partition_layers(topology: TopologyConfig, architecture: TransformerArchitectureConfig) -> tuple[range, ...]:
    """Return the layers of each pipeline stage, in order. Stage s is on pipeline rank s modulo pipe_parallel_size.

    Raises a validation error about the responsible `topology` field if the layers cannot be partitioned into these stages.
    """
    layers, stages = architecture.num_layers, topology.pipeline_stage_count
    if stages > layers:
        product = f"{topology.pipeline_parallel_size} x {topology.pipe_stages_per_rank} = " if topology.pipe_stages_per_rank > 1 else ""
        reason = f"{product}{stages} stages exceed transformer_architecture.num_layers {layers}"
        raise build_field_error("topology.pipe_parallel_size", reason, f"use at most {layers} stages: each stage needs a layer")
    if topology.pipe_partition_overwrite is not None:
        first_layers = _check_first_layers(topology.pipe_partition_overwrite, stages, layers)
    elif topology.pipe_partition_method is PipePartitionMethod.balanced:
        first_layers = _partition_layers_by_cost(_estimate_layer_costs(architecture), stages)
    else:
        first_layers = _partition_layers_uniformly(stages, layers)
    return tuple(range(first_layer, end_layer) for first_layer, end_layer in zip(first_layers, [*first_layers[1:], layers], strict=True))


def count_scheduled_micro_batches(topology: TopologyConfig, assigned_micro_batches: int) -> int:
    """Return the number of micro batches that a pipeline runs per step: `assigned_micro_batches`, plus empty ones as padding.

    1F1B needs at least as many micro batches as stages; interleaved 1F1B needs a multiple of the number of pipeline ranks.
    """
    if topology.pipe_stages_per_rank == 1:
        return max(assigned_micro_batches, topology.pipeline_parallel_size)
    return max(1, -(-assigned_micro_batches // topology.pipeline_parallel_size)) * topology.pipeline_parallel_size


def compute_bubble_fraction(topology: TopologyConfig, assigned_micro_batches: int) -> float:
    """Return the pipeline bubble: the fraction of a step (0 to 1) in which a rank is idle.

    A rank is idle while the pipeline fills and drains, and during empty micro batches.
    """
    stages_per_rank = topology.pipe_stages_per_rank
    return 1 - stages_per_rank * assigned_micro_batches / (
        stages_per_rank * count_scheduled_micro_batches(topology, assigned_micro_batches) + topology.pipeline_parallel_size - 1
    )


def _partition_layers_uniformly(stages: int, layers: int) -> list[int]:
    return [stage * layers // stages for stage in range(stages)]


def _check_first_layers(first_layers: Sequence[int], stages: int, layers: int) -> Sequence[int]:
    name, hint = "topology.pipe_partition_overwrite", f"for a uniform partition, use {_partition_layers_uniformly(stages, layers)}"
    if len(first_layers) != stages:
        raise build_field_error(
            name, f"names {len(first_layers)} first layer{'' if len(first_layers) == 1 else 's'}, but there are {stages} stages", hint
        )
    if first_layers[0] != 0:
        raise build_field_error(name, f"begins with layer {first_layers[0]}: the first stage must start with layer 0", hint)
    if any(after <= before for before, after in pairwise(first_layers)):
        raise build_field_error(name, f"{list(first_layers)} is not increasing: each stage must start after the previous one", hint)
    if first_layers[-1] >= layers:
        raise build_field_error(name, f"starts a stage with layer {first_layers[-1]}: the last layer of {layers} is {layers - 1}", hint)
    return first_layers


def _estimate_layer_costs(architecture: TransformerArchitectureConfig) -> list[int]:
    """Return the number of multiplications per token in each layer. The first includes the embedding, the last the output layer."""
    hidden = architecture.hidden_size
    projections = 2 * hidden * (architecture.num_attention_heads + architecture.kv_heads) * architecture.head_size
    scores = (
        architecture.attention_width * architecture.sequence_length
    )  # QK^T and attention weights times V, each over half the sequence on average
    mlp = (3 if architecture.mlp_type is MlpType.swiglu else 2) * hidden * architecture.mlp_width
    costs = [projections + scores + mlp] * architecture.num_layers
    costs[0] += hidden  # the embedding only looks up a row
    costs[-1] += 0 if architecture.embedding_head_config else hidden * architecture.vocab_size
    return costs


def _partition_layers_by_cost(costs: Sequence[int], stages: int) -> list[int]:
    """Return the index of the first layer of each of `stages` pipeline stages, so that the cost of the most expensive stage is minimal."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _fill_stages_up_to_cost(costs, stages, middle) is None:
            low = middle + 1
        else:
            high = middle
    first_layers = _fill_stages_up_to_cost(costs, stages, low)
    assert first_layers is not None  # noqa: S101  # feasible: the search ends at the lowest feasible limit, and sum(costs) is always feasible
    return first_layers


def _fill_stages_up_to_cost(layer_costs: Sequence[int], num_stages: int, max_stage_cost: int) -> list[int] | None:
    """Return the index of each pipeline stage's first layer such that no stage costs more than `max_stage_cost`; None if impossible.

    Later stages are filled first, so that early stages have fewer layers: they keep the activations of more micro batches.
    """
    first_layers, end = [], len(layer_costs)
    for earlier_stages in reversed(range(num_stages)):
        first = end
        while first > earlier_stages and sum(layer_costs[first - 1 : end]) <= max_stage_cost:
            first -= 1
        first_layers.append(first)
        end = first
    return first_layers[::-1] if end == 0 else None
