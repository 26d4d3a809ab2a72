"""Whom a node waits for that finds no GPU free: Swarm says only that resources are insufficient.

A run that swarmtrain deploys waits before it starts anything; this is for one that `docker stack deploy` has started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm.claims import Supply, supplies
from swarmtrain.launchers.swarm.observe import Service
from swarmtrain.launchers.swarm.resources import counted, reserved

_WAITS = "insufficient resources"


def told(engine: Engine, run: str, services: list[Service], states: list[TaskState]) -> list[TaskState]:
    """Return `states`, those of nodes that wait for resources with whoever has them. Raises EngineError."""
    kinds = {kind for service in services for kind in counted(reserved(service.spec["TaskTemplate"]))}
    if not kinds or not any(_WAITS in state.reason for state in states):
        return states
    nodes, others, tasks = (engine.listing(path) for path in ("/nodes", "/services", "/tasks"))
    found = {kind: list(supplies(nodes, others, tasks, kind, but=run).values()) for kind in sorted(kinds)}
    return [waiting(state, found) for state in states]


def waiting(state: TaskState, found: Mapping[str, Sequence[Supply]]) -> TaskState:
    """Return `state`, if it is that of a node that waits for resources with whoever has them of those that are `found`, by kind."""
    if _WAITS not in state.reason:
        return state
    there = [(kind, supply) for kind, each in found.items() for supply in each if supply.host == state.host]
    has = [f"{stack or 'another'} has {count} of {at.declared} {kind}" for kind, at in there for stack, count in at.claimed.items()]
    return replace(state, reason="; ".join([state.reason, *has]))
