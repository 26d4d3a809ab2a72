"""Resource accounting: the engine's nodes, services and tasks → the resources that are free for a run."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.swarm.resources.resource_accounting import (
    ResourceSupply,
    add_reservations_to_pending_reason,
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
RESERVATIONS = {
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


@pytest.mark.parametrize("name", RESERVATIONS)
def test_reservations_of_other_runs_are_not_free(name: str) -> None:
    services, tasks, reserved = RESERVATIONS[name]
    supply = compute_resource_supplies([build_node("x"), build_node("y")], services, tasks, KIND, excluded_stack="mine")["id of x"]
    assert supply == ResourceSupply("x", 2, reserved)
    assert supply.free_count == 2 - sum(reserved.values())


def test_a_pending_node_names_who_has_reserved_its_gpus() -> None:
    supplies = {KIND: [ResourceSupply("x", 2, {"a": 1, "": 1}), ResourceSupply("y", 2, {"b": 1})]}
    pending = TaskState("node0", "x", "pending", "no suitable node (insufficient resources on 1 node)")
    assert (
        add_reservations_to_pending_reason(pending, supplies).reason
        == f"{pending.reason}; NVIDIA-GPU: 2 in total, 1 reserved by a service outside any stack, 1 reserved by a"
    )
    running = TaskState("node1", "y", "running")
    assert add_reservations_to_pending_reason(running, supplies) == running
