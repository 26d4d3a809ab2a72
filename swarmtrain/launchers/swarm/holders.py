"""Whom a node waits for that finds no GPU free: Swarm says only that resources are insufficient.

A run that swarmtrain deploys waits before it starts anything; this is for one that `docker stack deploy` has started.
"""

from __future__ import annotations

from dataclasses import replace

from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm.claims import supplies
from swarmtrain.launchers.swarm.observe import Service
from swarmtrain.launchers.swarm.resources import counted, reserved

_WAITS = "insufficient resources"


def told(engine: Engine, run: str, services: list[Service], states: list[TaskState]) -> list[TaskState]:
    """Return `states`, those of nodes that wait for resources with whoever has them. Raises EngineError."""
    kinds = {kind for service in services for kind in counted(reserved(service.spec["TaskTemplate"]))}
    if not kinds or not any(_WAITS in state.reason for state in states):
        return states
    nodes, others, tasks = (engine.listing(path) for path in ("/nodes", "/services", "/tasks"))
    claimed: dict[str, list[str]] = {}
    for kind in sorted(kinds):
        for supply in supplies(nodes, others, tasks, kind, but=run).values():
            has = [f"{stack or 'another service'} has {count} of {supply.declared} {kind}" for stack, count in supply.claimed.items()]
            claimed.setdefault(supply.host, []).extend(has)
    return [_told(state, claimed.get(state.host, [])) for state in states]


def _told(state: TaskState, others: list[str]) -> TaskState:
    return replace(state, reason="; ".join([state.reason, *others])) if _WAITS in state.reason else state
