"""How a pipeline divides a model and a batch: layers into stages, micro batches onto its schedule. Values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from swarmtrain.config.base import wrong
from swarmtrain.config.topology import PipePartitionMethod, TopologyConfig
from swarmtrain.config.transformer_architecture import MlpType, TransformerArchitectureConfig


def cuts(topology: TopologyConfig, shape: TransformerArchitectureConfig) -> tuple[range, ...]:
    """Return the layers of each stage, in order. Stage s is on pipeline rank s modulo pipe_parallel_size.

    Raises the error that blames the topology's field if the layers cannot be cut so.
    """
    layers, stages = shape.num_layers, topology.stages
    if stages > layers:
        product = f"{topology.pipeline} x {topology.pipe_stages_per_rank} = " if topology.pipe_stages_per_rank > 1 else ""
        reason = f"{product}{stages} stages are more than transformer_architecture.num_layers {layers}"
        raise wrong("topology.pipe_parallel_size", reason, f"each stage needs a layer: {layers} stages at most")
    if topology.pipe_partition_overwrite is not None:
        firsts = _checked(topology.pipe_partition_overwrite, stages, layers)
    elif topology.pipe_partition_method is PipePartitionMethod.balanced:
        firsts = _balanced(_costs(shape), stages)
    else:
        firsts = _uniform(stages, layers)
    return tuple(range(first, end) for first, end in zip(firsts, [*firsts[1:], layers], strict=True))


def on_schedule(topology: TopologyConfig, share: int) -> int:
    """Return how many micro batches a replica sends down its pipeline for a share of `share`: empty ones fill it up.

    1F1B takes as many as there are stages at least; interleaved, whole rounds of one for each rank.
    """
    if topology.pipe_stages_per_rank == 1:
        return max(share, topology.pipeline)
    return max(1, -(-share // topology.pipeline)) * topology.pipeline


def idle(topology: TopologyConfig, share: int) -> float:
    """Return the part of a step in which a rank has nothing to do: the pipeline's filling and draining, and empty micro batches."""
    rounds = topology.pipe_stages_per_rank
    return 1 - rounds * share / (rounds * on_schedule(topology, share) + topology.pipeline - 1)


def _uniform(stages: int, layers: int) -> list[int]:
    return [stage * layers // stages for stage in range(stages)]


def _checked(firsts: Sequence[int], stages: int, layers: int) -> Sequence[int]:
    name, hint = "topology.pipe_partition_overwrite", f"uniform cuts are {_uniform(stages, layers)}"
    if len(firsts) != stages:
        raise wrong(name, f"names {len(firsts)} first layer{'' if len(firsts) == 1 else 's'}, and there are {stages} stages", hint)
    if firsts[0] != 0:
        raise wrong(name, f"begins with layer {firsts[0]}: the first stage's first layer is 0", hint)
    if any(after <= before for before, after in pairwise(firsts)):
        raise wrong(name, f"{list(firsts)} does not rise: each stage begins after the one before", hint)
    if firsts[-1] >= layers:
        raise wrong(name, f"begins a stage with layer {firsts[-1]}: the last of {layers} is {layers - 1}", hint)
    return firsts


def _costs(shape: TransformerArchitectureConfig) -> list[int]:
    """Return each layer's multiplications for one token, the embedding's and the head's with those of the layer beside them."""
    hidden = shape.hidden_size
    projections = 2 * hidden * (shape.num_attention_heads + shape.kv_heads) * shape.head_size
    scores = (
        shape.attention_width * shape.sequence_length
    )  # queries with keys and weights with values, each for half the sequence on average
    mlp = (3 if shape.mlp_type is MlpType.swiglu else 2) * hidden * shape.mlp_width
    costs = [projections + scores + mlp] * shape.num_layers
    costs[0] += hidden  # the embedding only fetches a row
    costs[-1] += 0 if shape.embedding_head_config else hidden * shape.vocab_size
    return costs


def _balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Return the first layers of `stages` stages whose dearest is as cheap as can be."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _filled(costs, stages, middle) is None:
            low = middle + 1
        else:
            high = middle
    firsts = _filled(costs, stages, low)
    assert firsts is not None  # noqa: S101  # one stage of all layers fits the sum, and the search ends where all fit
    return firsts


def _filled(costs: Sequence[int], stages: int, limit: int) -> list[int] | None:
    """Return first layers of stages that cost at most `limit` each, None if there are none. The later stages are the fuller:
    the first ones keep the activations of more micro batches.
    """
    firsts, end = [], len(costs)
    for before in reversed(range(stages)):
        first = end
        while first > before and sum(costs[first - 1 : end]) <= limit:
            first -= 1
        firsts.append(first)
        end = first
    return firsts[::-1] if end == 0 else None
