"""Reserve GPUs of a swarm without a scheduler: all that a run requests are free, or the deploy is refused.

Swarm assigns free resources to services one by one, in no particular order: of two runs with half of the GPUs each, both would wait
forever. So a deploy that finds too few free resources creates no service. The check and the creation of the services hold one lock of the
whole swarm, so no two deploys find the same GPUs free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swarmtrain.errors import ResourcesReserved, StackError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.resources.resource_accounting import (
    RequestedAmounts,
    ResourceSupply,
    compute_resource_supplies,
    find_pinned_node,
)
from swarmtrain.launchers.swarm.run_lock import RunLock
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts

_LABEL_RESERVATION = "swarmtrain.reservation.of"
_LOCK_NAME = "swarmtrain-reservations"


@dataclass(frozen=True)
class ResourceRequest:
    """Resources that a run requests: the amount of the generic resource `kind` per node, by the placement constraint of the node."""

    run: str
    kind: str = ""
    amounts: RequestedAmounts = field(default_factory=dict)


@contextlib.contextmanager
def reserve_resources(
    engine: DockerEngine, request: ResourceRequest, report_progress: ProgressReporter, timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS
) -> Iterator[Callable[[], None]]:
    """Check that all requested resources are free, and keep other deploys from reserving any until the end of the body.

    Create the services in the body. It receives a function to call before each change, which raises StackError if another deploy may have
    reserved resources meanwhile, because this process was suspended. Raises EngineError; ResourcesReserved if resources are not free;
    StackError if a node does not declare as many as requested.
    """
    lock = RunLock(engine, request.run, f"reserves {request.kind}", timeouts, kind_label=_LABEL_RESERVATION, name=_LOCK_NAME)
    with lock.hold_lock(report_progress):
        _check_resources_free(engine, request)
        yield lock.check_lock_held


def _check_resources_free(engine: DockerEngine, request: ResourceRequest) -> None:
    nodes = engine.list_objects("/nodes")
    supplies = compute_resource_supplies(
        nodes, engine.list_objects("/services"), engine.list_objects("/tasks"), request.kind, excluded_stack=request.run
    )
    pinned = [(find_pinned_node(constraint, nodes), amount) for constraint, amount in request.amounts.items()]
    # Swarm reports a node that does not exist.
    shortages = [_describe_shortage(supplies[node["ID"]], request.kind, amount) for node, amount in pinned if node is not None]
    if any(shortages):
        hint = "deploy with --wait to wait until they are free, or start a scheduler that queues runs: swarmtrain queue up"
        message = f"not all of its {request.kind} are free: {'; '.join(filter(None, shortages))}"
        raise ResourcesReserved(message, place=f"run {request.run}", hint=hint)


def _describe_shortage(supply: ResourceSupply, kind: str, requested: int) -> str:
    """Return who has reserved resources of which `requested` are not free; empty if they are. Raises StackError."""
    if supply.declared < requested:
        message = f"has {supply.declared} {kind}, and {requested} are requested"
        raise StackError(message, place=f"node {supply.host}", hint="print the settings that declare them with: swarmtrain doctor CONFIG")
    if supply.free_count >= requested:
        return ""
    return f"{supply.host} has {supply.declared}, {requested} requested, {', '.join(supply.describe_reservations())}"
