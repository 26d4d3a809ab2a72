"""Gang scheduling of GPUs: a run acquires all of its GPUs at once, or waits. Otherwise two runs with half of the GPUs each would deadlock.

Swarm assigns free resources to services one by one, in no particular order. So a run that finds too few free resources creates no
service: it records its request as a queue entry in the swarm (a config object, separate from the run's lock), and polls. Resources that
earlier entries request count as assigned: first come, first served, without starvation.

Entries are ordered by their creation on the managers. A run starts to poll only after it has created its entry, and removes the entry only
when its services exist. So if two runs poll at the same time, the later one sees the entry of the earlier one. A waiting run renews its
entry every few seconds; an entry that is no longer renewed does not count, because its owner has died.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from swarmtrain.errors import StackError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.engine_values import parse_count, parse_mapping
from swarmtrain.launchers.swarm.cluster_state import LABEL_QUEUE
from swarmtrain.launchers.swarm.resources.resource_accounting import (
    RequestedAmounts,
    ResourceSupply,
    compute_resource_supplies,
    find_pinned_node,
)
from swarmtrain.launchers.swarm.run_lock import RunLock
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts
from swarmtrain.run_identity import RunIdentity

_AMOUNTS_LABEL = "swarmtrain.queue.amounts"
_KIND_LABEL = "swarmtrain.queue.resource"
_POSITION_LABEL = "swarmtrain.queue.position"
_POLL_SECONDS = 1.0
_REMINDER_SECONDS = 30.0
ApiObject = dict[str, Any]


@dataclass(frozen=True)
class ResourceRequest:
    """Resources that a run requests: the amount of the generic resource `kind` per node, by the placement constraint of the node.

    With an empty request, a run does not wait. If `can_wait` is False, the request is refused instead of queued.
    """

    run: str
    kind: str = ""
    amounts: RequestedAmounts = field(default_factory=dict)
    can_wait: bool = True
    identity: RunIdentity | None = None
    """The identity that the run gets if it does not exist yet."""


@contextlib.contextmanager
def wait_for_resources(
    engine: DockerEngine,
    request: ResourceRequest,
    lock: RunLock,
    report_progress: ProgressReporter,
    timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS,
) -> Iterator[None]:
    """Wait until all resources that the run requests are free and no earlier run waits for them.

    Context manager: create the services in its body. `lock` is the run's lock, which must be held; it is preemptible during the wait.
    Raises EngineError; StackError if another command takes the lock meanwhile, or if a node does not declare the requested amount.
    """
    if not request.amounts:
        yield
        return
    queue_entry = RunLock(engine, request.run, f"waits for {request.kind} held by other runs", timeouts, kind_label=LABEL_QUEUE)
    queue_entry.labels = {
        **(request.identity.labels if request.identity else {}),
        _KIND_LABEL: request.kind,
        _AMOUNTS_LABEL: json.dumps(dict(request.amounts), sort_keys=True),
    }
    with queue_entry.hold_lock(report_progress):
        # The entry's position in the queue is its first version index; later updates change the index.
        queue_entry.labels[_POSITION_LABEL] = str(_read_own_queue_entry(engine, request)["Version"]["Index"])
        queue_entry.write_labels()
        _wait_for_queue_turn(engine, request, lock, report_progress, timeouts)
        queue_entry.check_lock_held()
        yield


def _wait_for_queue_turn(
    engine: DockerEngine, request: ResourceRequest, lock: RunLock, report_progress: ProgressReporter, timeouts: SwarmTimeouts
) -> None:
    reported, reminded_at, is_preemptible = "", time.monotonic(), False
    while missing := _describe_missing_resources(engine, request, timeouts):
        if not request.can_wait:
            hint = "wait until they are free, or skip the probe with: swarmtrain doctor CONFIG --no-probe"
            raise StackError(f"not all of its {request.kind} are free: {missing}", place=f"run {request.run}", hint=hint)
        if not is_preemptible:
            lock.allow_preemption()
            is_preemptible = True
        if missing != reported or time.monotonic() - reminded_at > _REMINDER_SECONDS:
            reported, reminded_at = missing, time.monotonic()
            report_progress(f"waiting until all of its {request.kind} are free: {missing}")
        time.sleep(_POLL_SECONDS)
        if not lock.is_held_by_this_command():
            raise lock.build_preemption_error()
    if is_preemptible and not lock.reacquire_lock():
        raise lock.build_preemption_error()


def _describe_missing_resources(engine: DockerEngine, request: ResourceRequest, timeouts: SwarmTimeouts) -> str:
    """Return a text that names the requested resources that are not free, and their holders; empty if the run can start."""
    # Entries are read before services: if a run's entry is already removed, its services exist, and are read next.
    earlier_requests = list_earlier_requests(engine.list_objects("/configs", label=LABEL_QUEUE), request, timeouts.queue_entry_ttl_seconds)
    nodes = engine.list_objects("/nodes")
    supplies_by_node = compute_resource_supplies(
        nodes, engine.list_objects("/services"), engine.list_objects("/tasks"), request.kind, excluded_stack=request.run
    )
    shortages = [
        _describe_resource_shortage(nodes, supplies_by_node, request, constraint, earlier_requests) for constraint in request.amounts
    ]
    return "; ".join(filter(None, shortages))


def _describe_resource_shortage(
    nodes: list[ApiObject],
    supplies_by_node: dict[str, ResourceSupply],
    request: ResourceRequest,
    constraint: str,
    earlier_requests: list[ResourceRequest],
) -> str:
    node, requested = find_pinned_node(constraint, nodes), request.amounts[constraint]
    if node is None:
        return ""  # the node does not exist, and Swarm reports that
    supply = supplies_by_node[node["ID"]]
    if supply.declared < requested:
        message = f"has {supply.declared} {request.kind}, and {requested} are requested"
        raise StackError(message, place=f"node {supply.host}", hint="print the settings that declare them with: swarmtrain doctor CONFIG")
    # Resources that an earlier run already has are counted as claimed, so they are subtracted from its request.
    claimed_earlier = {
        earlier_request.run: outstanding
        for earlier_request in earlier_requests
        if (outstanding := _count_requested_resources(earlier_request, node, nodes) - supply.claimed.get(earlier_request.run, 0)) > 0
    }
    if supply.free_count - sum(claimed_earlier.values()) >= requested:
        return ""
    holders = [f"{_describe_resource_holder(stack)} has {count}" for stack, count in sorted(supply.claimed.items())]
    holders += [f"run {run} waits for {count}" for run, count in claimed_earlier.items()]
    return f"{supply.host} has {supply.declared}, {requested} requested, {', '.join(holders)}"


def _count_requested_resources(earlier_request: ResourceRequest, node: ApiObject, nodes: list[ApiObject]) -> int:
    return sum(count for constraint, count in earlier_request.amounts.items() if find_pinned_node(constraint, nodes) is node)


def _describe_resource_holder(stack: str) -> str:
    return stack or "a service outside any stack"


def _read_own_queue_entry(engine: DockerEngine, request: ResourceRequest) -> ApiObject:
    entry: ApiObject = engine.get(f"/configs/{request.run}_queue")
    return entry


def list_earlier_requests(queue_entries: list[ApiObject], request: ResourceRequest, ttl_seconds: float) -> list[ResourceRequest]:
    """Return the requests for the same resource kind that entered the queue before `request`, in queue order. See list_requests."""
    positions = {entry["Spec"]["Labels"][LABEL_QUEUE]: _get_queue_position(entry) for entry in queue_entries}
    return [
        live_request
        for live_request in list_requests(queue_entries, ttl_seconds)
        if live_request.kind == request.kind and positions[live_request.run] < positions.get(request.run, 0)
    ]


def list_requests(queue_entries: list[ApiObject], ttl_seconds: float) -> list[ResourceRequest]:
    """Return the requests of the config objects `queue_entries`, in queue order.

    A request that was not renewed for `ttl_seconds` seconds is omitted. Its age is computed from the managers' timestamps only, so this
    machine's clock does not matter.
    """
    renewed_at = {entry["ID"]: datetime.fromisoformat(entry["UpdatedAt"]).timestamp() for entry in queue_entries}
    now = max(renewed_at.values(), default=0.0)
    live_entries = [entry for entry in queue_entries if now - renewed_at[entry["ID"]] < ttl_seconds]
    return [_parse_resource_request(entry) for entry in sorted(live_entries, key=_get_queue_position)]


def _get_queue_position(entry: ApiObject) -> int:
    return parse_count(entry["Spec"]["Labels"].get(_POSITION_LABEL), default=int(entry["Version"]["Index"]))


def _parse_resource_request(entry: ApiObject) -> ResourceRequest:
    labels = entry["Spec"]["Labels"]
    amounts = {constraint: parse_count(amount) for constraint, amount in parse_mapping(labels.get(_AMOUNTS_LABEL)).items()}
    return ResourceRequest(labels[LABEL_QUEUE], labels.get(_KIND_LABEL, ""), amounts, identity=RunIdentity.from_labels(labels))
