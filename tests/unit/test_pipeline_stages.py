"""Layers are partitioned into stages, and micro batches fill a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from swarmtrain.config.pipeline_layout import compute_bubble_fraction, count_scheduled_micro_batches, partition_layers
from swarmtrain.config.schema.topology import PipePartitionMethod, TopologyConfig
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig


def build_topology(ranks: int, **fields: object) -> TopologyConfig:
    return TopologyConfig.model_validate({"pipe_parallel_size": ranks, "global_batch_size": 64, "micro_batch_size": 1, **fields})


def list_stage_sizes(topology: TopologyConfig, **shape: int) -> list[int]:
    return [len(layers) for layers in partition_layers(topology, TransformerArchitectureConfig.model_validate(shape))]


@given(ranks=some.integers(1, 6), rounds=some.integers(1, 3), more=some.integers(0, 20), method=some.sampled_from(PipePartitionMethod))
def test_every_layer_is_in_one_stage_and_no_stage_is_empty(ranks: int, rounds: int, more: int, method: PipePartitionMethod) -> None:
    rounds = rounds if ranks > 1 else 1
    topology = build_topology(ranks, pipe_stages_per_rank=rounds, pipe_partition_method=method, global_batch_size=ranks)
    stages = partition_layers(topology, TransformerArchitectureConfig(num_layers=ranks * rounds + more))
    assert [layer for layers in stages for layer in layers] == list(range(ranks * rounds + more))
    assert len(stages) == ranks * rounds
    assert all(stages)
    if method is PipePartitionMethod.uniform:
        assert max(map(len, stages)) - min(map(len, stages)) <= 1


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [(256, [4, 4, 4]), (6_000, [4, 5, 3]), (24_000, [5, 6, 1])],
    ids=["a small head", "a head of a layer", "a head of four"],
)
def test_balanced_counts_the_head(vocab_size: int, expected: list[int]) -> None:
    """A layer of this shape costs about 1.9 million multiplications per token, the head 384 x vocab_size."""
    topology = build_topology(3, pipe_partition_method=PipePartitionMethod.balanced)
    assert list_stage_sizes(topology, num_layers=12, hidden_size=384, vocab_size=vocab_size) == expected


def test_balanced_leaves_the_first_stage_the_least_as_it_keeps_the_most_activations() -> None:
    assert list_stage_sizes(build_topology(4, pipe_partition_method=PipePartitionMethod.balanced), num_layers=9, hidden_size=384) == [
        1,
        3,
        3,
        2,
    ]


def test_explicit_cuts_come_first() -> None:
    topology = build_topology(3, pipe_partition_method=PipePartitionMethod.balanced, pipe_partition_overwrite=(0, 1, 5))
    assert partition_layers(topology, TransformerArchitectureConfig(num_layers=8)) == (range(1), range(1, 5), range(5, 8))


@pytest.mark.parametrize(
    ("rounds", "share", "scheduled"), [(1, 0, 4), (1, 3, 4), (1, 9, 9), (2, 0, 4), (2, 4, 4), (2, 5, 8), (2, 9, 12)], ids=str
)
def test_empty_micro_batches_fill_the_schedule(rounds: int, share: int, scheduled: int) -> None:
    assert count_scheduled_micro_batches(build_topology(4, pipe_stages_per_rank=rounds), share) == scheduled


def test_idle_time_is_the_pipelines_warmup_and_drain_and_its_empty_micro_batches() -> None:
    assert compute_bubble_fraction(build_topology(4), 9) == pytest.approx(3 / 12)
    assert compute_bubble_fraction(build_topology(4, pipe_stages_per_rank=2), 8) == pytest.approx(3 / 19)
    assert compute_bubble_fraction(build_topology(4), 2) == pytest.approx(5 / 7)
    assert compute_bubble_fraction(build_topology(1), 2) == 0
