"""Estimate of the memory that a config needs on each rank, before a cluster is used.

simulated_rank        a rank on fake tensors, which computes nothing
fused_rms_norm        RMS normalization as one operation, as on a GPU
allocation_tracker    records allocations and their kinds
simulation            the allocations of one step of a simulated rank

This module determines which ranks have to be simulated (one per pipeline rank), with how many micro batches, and which config changes save
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.memory.allocation_tracker import AllocationKind
from swarmtrain.trainer.memory.simulation import simulate_memory_peaks

__all__ = ["AllocationKind", "RankMemoryEstimate", "estimate_memory", "suggest_memory_savings"]

_STEADY_MICRO_BATCHES = 3
"""Number of micro batches that have to be simulated: the first, one that accumulates gradients, and the last. More of them do not raise the
peak, except in a pipeline."""


@dataclass(frozen=True)
class RankMemoryEstimate:
    """Estimated memory in bytes of one simulated rank. Other ranks with the same pipeline stages do not need more memory."""

    rank: int
    """The simulated rank: the lowest rank with these pipeline stages."""
    stages: tuple[int, ...]
    """Pipeline stages of the rank; (0,) without pipeline parallelism."""
    startup_peak: int
    """Peak in bytes while model and optimizer are created."""
    peak: int
    """Peak in bytes during training steps."""
    breakdown: Mapping[AllocationKind, int]
    """Allocated bytes at the peak of training steps, by kind of allocation."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stages": list(self.stages),
            "startup_peak": self.startup_peak,
            "peak": self.peak,
            "memory_by_category": {str(kind): size for kind, size in self.breakdown.items()},
        }


def estimate_memory(config: Config, world_size: int) -> list[RankMemoryEstimate]:
    """Return the estimates for a run with `world_size` ranks: one per pipeline rank; without pipeline parallelism, one for rank 0.

    Other ranks do not need more memory: the first replica has the most micro batches, and tensor-parallel ranks need the same memory.
    Raises SwarmtrainError if the number of ranks does not match the config, or if the step cannot be simulated.
    """
    pipe_size = config.topology.pipeline_parallel_size
    return [_estimate_rank_memory(config, world_size, pipe_rank * world_size // pipe_size) for pipe_rank in range(pipe_size)]


def suggest_memory_savings(config: Config, world_size: int) -> Iterator[tuple[tuple[str, ...], list[RankMemoryEstimate]]]:
    """Yield config overrides that may need less memory, with their estimates: first single changes, then a combination of changes."""
    current = config.model_dump(mode="json")
    tried: list[dict[str, object]] = []
    for candidate in _list_candidate_overrides(config.topology, world_size):
        changes = {key: value for key, value in candidate.items() if current[key.partition(".")[0]][key.partition(".")[2]] != value}
        if not changes or changes in tried:
            continue
        tried.append(changes)
        try:
            changed = _apply_overrides(config, changes)
            estimates = estimate_memory(changed, world_size)
        except (ValidationError, SwarmtrainError):
            continue  # not compatible with the rest of this config
        yield tuple(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()), estimates


def _estimate_rank_memory(config: Config, world_size: int, rank: int) -> RankMemoryEstimate:
    topology = config.topology
    try:
        micro_batches = topology.divide_micro_batches(_count_replicas_per_learner(topology, world_size), learners=1)[0]
    except ValueError as error:
        hint = "set the number of ranks with --ranks"
        raise SwarmtrainError(str(error), place="config topology", hint=hint) from None
    stages = tuple(
        range(rank * topology.pipeline_parallel_size // world_size, topology.pipeline_stage_count, topology.pipeline_parallel_size)
    )
    max_micro_batches = (
        _STEADY_MICRO_BATCHES if topology.pipeline_parallel_size == 1 else _STEADY_MICRO_BATCHES * topology.pipeline_parallel_size
    )
    if micro_batches <= max_micro_batches:
        return _simulate_rank_memory(config, world_size, rank, stages)
    longer_estimate = _simulate_rank_memory(_set_micro_batches_per_replica(config, world_size, max_micro_batches), world_size, rank, stages)
    if topology.pipeline_parallel_size == 1:
        return longer_estimate
    # A pipeline keeps buffers for each micro batch of a step: simulate two numbers of micro batches, and extrapolate.
    shorter_estimate = _simulate_rank_memory(
        _set_micro_batches_per_replica(config, world_size, max_micro_batches - topology.pipeline_parallel_size), world_size, rank, stages
    )
    rounds = (micro_batches - max_micro_batches) / topology.pipeline_parallel_size
    breakdown = {
        kind: _extrapolate_memory_linearly(shorter_estimate.breakdown.get(kind, 0), longer_estimate.breakdown.get(kind, 0), rounds)
        for kind in AllocationKind
    }
    peak = _extrapolate_memory_linearly(shorter_estimate.peak, longer_estimate.peak, rounds)
    return RankMemoryEstimate(
        rank, stages, longer_estimate.startup_peak, peak, {kind: byte_count for kind, byte_count in breakdown.items() if byte_count}
    )


def _extrapolate_memory_linearly(shorter_step_bytes: int, longer_step_bytes: int, extra_rounds: float) -> int:
    return round(longer_step_bytes + (longer_step_bytes - shorter_step_bytes) * extra_rounds)


def _simulate_rank_memory(config: Config, world_size: int, rank: int, stages: tuple[int, ...]) -> RankMemoryEstimate:
    try:
        startup, peak = simulate_memory_peaks(config, world_size, rank)
    except SwarmtrainError:
        raise
    except Exception as error:  # torch raises errors of many types for tensors without data
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SwarmtrainError(
            f"cannot be simulated on rank {rank}: torch needs actual tensor values there: {reason}",
            place="config",
            hint="train it with a small num_layers to measure its memory, and extrapolate",
        ) from error
    return RankMemoryEstimate(rank, stages, startup.size, peak.size, peak.breakdown)


def _set_micro_batches_per_replica(config: Config, world_size: int, micro_batches: int) -> Config:
    """Return `config` with a global batch size of `micro_batches` micro batches per replica, for each learner that it trains."""
    topology = config.topology
    replicas = _count_replicas_per_learner(topology, world_size) * (topology.learners or 1)
    global_batch_size = micro_batches * replicas * topology.samples_per_micro_batch
    return _apply_overrides(config, {"topology.global_batch_size": global_batch_size})


def _count_replicas_per_learner(topology: TopologyConfig, world_size: int) -> int:
    """Return the number of replicas that train the same learners; all replicas if there are no learners."""
    return topology.compute_data_parallel_size(world_size) // len(topology.assign_learners(world_size))


def _apply_overrides(config: Config, overrides: Mapping[str, object]) -> Config:
    """Return `config` with the values of the dotted keys in `overrides` replaced.

    Raises pydantic.ValidationError if the result is invalid.
    """
    values = config.model_dump(mode="json")
    values["topology"] |= dict.fromkeys(("world_size", "data_parallel_size", "gradient_accumulation_steps"))
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return Config.from_json(json.dumps(values))


def _list_candidate_overrides(topology: TopologyConfig, world_size: int) -> Iterator[dict[str, object]]:
    checkpointing: dict[str, object] = {"topology.activation_checkpointing_type": "every_layer"}
    small_micro_batch: dict[str, object] = {"topology.micro_batch_size": 1} if topology.samples_per_micro_batch > 1 else {}
    fsdp: dict[str, object] = {"topology.data_parallel_type": "fsdp"}
    if topology.samples_per_micro_batch > 2:
        yield {"topology.micro_batch_size": topology.samples_per_micro_batch // 2}
    if small_micro_batch:
        yield small_micro_batch
    yield checkpointing
    yield {"optimizer.zero": True}
    yield fsdp
    yield {"optimizer.state_precision": "bfloat16"}
    yield {"transformer_architecture.precision": "bfloat16"}
    if world_size >= 2 * topology.ranks_per_replica:
        yield {"topology.model_parallel_size": 2 * topology.tensor_parallel_size}
    yield {**small_micro_batch, **checkpointing, **fsdp, "transformer_architecture.precision": "bfloat16"}
