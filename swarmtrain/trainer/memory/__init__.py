"""The memory that a config needs on each rank, told before any cluster is touched.

ledger        what is in memory, and what it is for
rehearsal     a step of one rank, with nothing in its tensors

Here: which ranks differ, how much of a step must be rehearsed, and what would need less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.config.topology import TopologyConfig
from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.memory.ledger import Kind
from swarmtrain.trainer.memory.rehearsal import rehearse

__all__ = ["Kind", "Need", "alternatives", "needs"]

_ENOUGH = 3
"""Micro batches of a replica after which a step needs no more memory: the first, one that is added to it, the last."""


@dataclass(frozen=True)
class Need:
    """What one kind of rank needs, in bytes."""

    rank: int
    """The first of its kind."""
    stages: tuple[int, ...]
    """The pipeline's stages that it has; (0,) without a pipeline."""
    start: int
    """Most while model and optimizer are made."""
    peak: int
    """Most while it trains."""
    parts: Mapping[Kind, int]
    """What is there at that peak."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stages": list(self.stages),
            "start": self.start,
            "peak": self.peak,
            "parts": {str(kind): size for kind, size in self.parts.items()},
        }


def needs(config: Config, size: int) -> list[Need]:
    """Return what each rank of one pipeline needs in a world of `size` ranks; without a pipeline, what rank 0 needs.

    Of replicas the first has the largest share, and of ranks that share layers each has as much as the others.
    Raises SwarmtrainError if the world does not fit the config, or cannot be rehearsed.
    """
    ranks = config.topology.pipeline
    return [_need(config, size, place * size // ranks) for place in range(ranks)]


def alternatives(config: Config, size: int) -> Iterator[tuple[tuple[str, ...], list[Need]]]:
    """Yield changes that may need less, as overrides, and what each needs: one by one, then all that are known to go together."""
    present = config.model_dump(mode="json")
    tried: list[dict[str, object]] = []
    for every in _changes(config.topology, size):
        changes = {key: value for key, value in every.items() if present[key.partition(".")[0]][key.partition(".")[2]] != value}
        if not changes or changes in tried:
            continue
        tried.append(changes)
        try:
            changed = _changed(config, changes)
            found = needs(changed, size)
        except (ValidationError, SwarmtrainError):
            continue  # it does not go with the rest of this config
        yield tuple(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()), found


def _need(config: Config, size: int, rank: int) -> Need:
    topology = config.topology
    try:
        share = topology.deal(size)[0]
    except ValueError as error:
        hint = "--ranks says how many there are to be"
        raise SwarmtrainError(str(error), place="config topology", hint=hint) from None
    stages = tuple(range(rank * topology.pipeline // size, topology.stages, topology.pipeline))
    most = _ENOUGH if topology.pipeline == 1 else _ENOUGH * topology.pipeline
    if share <= most:
        return _rehearsed(config, size, rank, stages)
    longest = _rehearsed(_shorter(config, size, most), size, rank, stages)
    if topology.pipeline == 1:
        return longest
    # A pipeline has room for each of a step's micro batches, so it is rehearsed twice and drawn out.
    shorter = _rehearsed(_shorter(config, size, most - topology.pipeline), size, rank, stages)
    rounds = (share - most) / topology.pipeline
    parts = {kind: _drawn_out(shorter.parts.get(kind, 0), longest.parts.get(kind, 0), rounds) for kind in Kind}
    peak = _drawn_out(shorter.peak, longest.peak, rounds)
    return Need(rank, stages, longest.start, peak, {kind: part for kind, part in parts.items() if part})


def _drawn_out(before: int, after: int, rounds: float) -> int:
    return round(after + (after - before) * rounds)


def _rehearsed(config: Config, size: int, rank: int, stages: tuple[int, ...]) -> Need:
    try:
        start, peak = rehearse(config, size, rank)
    except SwarmtrainError:
        raise
    except Exception as error:  # whatever torch has against tensors without data
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SwarmtrainError(
            f"cannot be rehearsed on rank {rank}: torch needs real numbers there: {reason}",
            place="config",
            hint="try it for real with a small num_layers, and multiply",
        ) from error
    return Need(rank, stages, start.size, peak.size, peak.parts)


def _shorter(config: Config, size: int, share: int) -> Config:
    """Return `config` with steps of which each replica takes `share` micro batches."""
    topology = config.topology
    batch = share * topology.data_parallel(size) * topology.micro_batch
    return _changed(config, {"topology.global_batch_size": batch})


def _changed(config: Config, changes: Mapping[str, object]) -> Config:
    """Return `config` with the values of dotted keys replaced. Raises pydantic.ValidationError if it then makes no sense."""
    values = config.model_dump(mode="json")
    values["topology"] |= dict.fromkeys(("world_size", "data_parallel_size", "gradient_accumulation_steps"))
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return Config.model_validate_json(json.dumps(values))


def _changes(topology: TopologyConfig, size: int) -> Iterator[dict[str, object]]:
    recompute: dict[str, object] = {"topology.activation_checkpointing_type": "every_layer"}
    small: dict[str, object] = {"topology.micro_batch_size": 1} if topology.micro_batch > 1 else {}
    divided: dict[str, object] = {"topology.data_parallel_type": "fsdp"}
    if topology.micro_batch > 2:
        yield {"topology.micro_batch_size": topology.micro_batch // 2}
    if small:
        yield small
    yield recompute
    yield {"optimizer.zero": True}
    yield divided
    yield {"optimizer.state_precision": "bfloat16"}
    yield {"transformer_architecture.precision": "bfloat16"}
    if size >= 2 * topology.replica:
        yield {"topology.model_parallel_size": 2 * topology.tensor}
    yield {**small, **recompute, **divided, "transformer_architecture.precision": "bfloat16"}
