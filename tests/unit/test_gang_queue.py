"""The gang queue: the engine's nodes, services, tasks and queue places → the resources that are free for a run."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.swarm.resources.gang_queue import ResourceRequest, list_earlier_requests
from swarmtrain.launchers.swarm.resources.resource_accounting import (
    ResourceSupply,
    append_resource_holders_to_pending_reason,
    compute_resource_supplies,
)

KIND = "NVIDIA-GPU"


def build_named_resources(*ids: str) -> list[dict[str, Any]]:
    return [{"NamedResourceSpec": {"Kind": KIND, "Value": name}} for name in ids]


def build_node(host: str) -> dict[str, Any]:
    resources = {"GenericResources": build_named_resources("GPU-1", "GPU-2")}
    return {"ID": f"id of {host}", "Description": {"Hostname": host, "Resources": resources}}


def build_task_template(count: int, pin: str) -> dict[str, Any]:
    reserved = [{"DiscreteResourceSpec": {"Kind": KIND, "Value": count}}]
    return {"Resources": {"Reservations": {"GenericResources": reserved}}, "Placement": {"Constraints": [pin]}}


def build_service(stack: str, count: int, pin: str, *, replicas: int = 1) -> dict[str, Any]:
    labels = {"com.docker.stack.namespace": stack}
    spec = {"Labels": labels, "TaskTemplate": build_task_template(count, pin), "Mode": {"Replicated": {"Replicas": replicas}}}
    return {"ID": f"{stack} at {pin}", "Spec": spec}


def build_task(
    parent: dict[str, Any], state: str, *, node_id: str = "", desired: str = "running", assigned_gpus: tuple[str, ...] = ()
) -> dict[str, Any]:
    spec = {**parent["Spec"]["TaskTemplate"], "ContainerSpec": {"Labels": parent["Spec"]["Labels"]}}
    fields = {
        "ServiceID": parent["ID"],
        "Spec": spec,
        "Status": {"State": state},
        "DesiredState": desired,
        "CreatedAt": "2026-11-21T10:00:00Z",
    }
    return {**fields, "NodeID": node_id, "GenericResources": build_named_resources(*assigned_gpus)}


WAITING_SERVICE = build_service("a", 2, "node.hostname==x")
ENDED_TASK = build_task(WAITING_SERVICE, "complete", node_id="id of x", desired="shutdown")
CLAIMS = {
    "a service that has no task yet": ([WAITING_SERVICE], [], {"a": 2}),
    "one that waits": ([WAITING_SERVICE], [build_task(WAITING_SERVICE, "pending")], {"a": 2}),
    "one that runs counts once": (
        [WAITING_SERVICE],
        [build_task(WAITING_SERVICE, "running", node_id="id of x", assigned_gpus=("GPU-1", "GPU-2"))],
        {"a": 2},
    ),
    "one that failed and comes back": (
        [WAITING_SERVICE],
        [build_task(WAITING_SERVICE, "failed", node_id="id of x", desired="shutdown")],
        {"a": 2},
    ),
    "one that is done": ([WAITING_SERVICE], [ENDED_TASK], {}),
    "one that is stopped": ([build_service("a", 2, "node.hostname==x", replicas=0)], [], {}),
    "one that stops still": (
        [],
        [build_task(WAITING_SERVICE, "running", node_id="id of x", desired="remove", assigned_gpus=("GPU-1",))],
        {"a": 1},
    ),
    "one pinned by id": ([build_service("a", 1, "node.id==id of x")], [], {"a": 1}),
    "one elsewhere": ([build_service("a", 1, "node.hostname==y")], [], {}),
    "the run's own": ([build_service("mine", 2, "node.hostname==x")], [], {}),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_others_have_claimed(name: str) -> None:
    services, tasks, claimed = CLAIMS[name]
    found = compute_resource_supplies([build_node("x"), build_node("y")], services, tasks, KIND, excluded_stack="mine")["id of x"]
    assert found == ResourceSupply("x", 2, claimed)
    assert found.free_count == 2 - sum(claimed.values())


def build_queue_place(run: str, index: int, *, position: int | None = None, updated_second: int = 0, kind: str = KIND) -> dict[str, Any]:
    labels = {"swarmtrain.queue.run": run, "swarmtrain.queue.resource": kind, "swarmtrain.queue.amounts": '{"node.hostname==x": 1}'}
    labels |= {} if position is None else {"swarmtrain.queue.position": str(position)}
    return {
        "ID": run,
        "Version": {"Index": index},
        "UpdatedAt": f"2026-11-21T10:00:{updated_second:02}.123456789Z",
        "Spec": {"Labels": labels},
    }


def test_queue_places_keep_the_order_of_their_creation_however_often_they_are_renewed() -> None:
    places = [
        build_queue_place("b", 90, position=20, updated_second=30),
        build_queue_place("a", 95, position=10, updated_second=28),
        build_queue_place("mine", 40, updated_second=31),
        build_queue_place("late", 50),
    ]
    assert list_earlier_requests(places, ResourceRequest("mine", KIND), 30) == [
        ResourceRequest("a", KIND, {"node.hostname==x": 1}),
        ResourceRequest("b", KIND, {"node.hostname==x": 1}),
    ]


def test_a_queue_place_that_is_stale_or_for_something_else_does_not_count() -> None:
    places = [
        build_queue_place("dead", 10, updated_second=1),
        build_queue_place("other", 11, updated_second=40, kind="FPGA"),
        build_queue_place("mine", 40, updated_second=45),
    ]
    assert list_earlier_requests(places, ResourceRequest("mine", KIND), 30) == []
    assert [request.run for request in list_earlier_requests(places, ResourceRequest("mine", KIND), 60)] == ["dead"]


def test_a_waiting_node_shows_for_whom_it_waits() -> None:
    found = {KIND: [ResourceSupply("x", 2, {"a": 1, "": 1}), ResourceSupply("y", 2, {"b": 1})]}
    pending = TaskState("node0", "x", "pending", "no suitable node (insufficient resources on 1 node)")
    assert (
        append_resource_holders_to_pending_reason(pending, found).reason
        == f"{pending.reason}; a has 1 of 2 NVIDIA-GPU; a service outside any stack has 1 of 2 NVIDIA-GPU"
    )
    running = TaskState("node1", "y", "running")
    assert append_resource_holders_to_pending_reason(running, found) == running
