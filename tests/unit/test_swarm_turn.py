"""Who waits for whom: what the engine answers about nodes, services, tasks and places in the queue → what is free for a run."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.swarm.claims import Supply, supplies
from swarmtrain.launchers.swarm.holders import waiting
from swarmtrain.launchers.swarm.turn import Need, ahead

KIND = "NVIDIA-GPU"


def named(*ids: str) -> list[dict[str, Any]]:
    return [{"NamedResourceSpec": {"Kind": KIND, "Value": name}} for name in ids]


def node(host: str) -> dict[str, Any]:
    resources = {"GenericResources": named("GPU-1", "GPU-2")}
    return {"ID": f"id of {host}", "Description": {"Hostname": host, "Resources": resources}}


def template(count: int, pin: str) -> dict[str, Any]:
    reserved = [{"DiscreteResourceSpec": {"Kind": KIND, "Value": count}}]
    return {"Resources": {"Reservations": {"GenericResources": reserved}}, "Placement": {"Constraints": [pin]}}


def service(stack: str, count: int, pin: str, *, replicas: int = 1) -> dict[str, Any]:
    labels = {"com.docker.stack.namespace": stack}
    spec = {"Labels": labels, "TaskTemplate": template(count, pin), "Mode": {"Replicated": {"Replicas": replicas}}}
    return {"ID": f"{stack} at {pin}", "Spec": spec}


def task(of: dict[str, Any], state: str, *, where: str = "", desired: str = "running", given: tuple[str, ...] = ()) -> dict[str, Any]:
    spec = {**of["Spec"]["TaskTemplate"], "ContainerSpec": {"Labels": of["Spec"]["Labels"]}}
    made = {"ServiceID": of["ID"], "Spec": spec, "Status": {"State": state}, "DesiredState": desired, "CreatedAt": "2026-11-21T10:00:00Z"}
    return {**made, "NodeID": where, "GenericResources": named(*given)}


A = service("a", 2, "node.hostname==x")
ENDED = task(A, "complete", where="id of x", desired="shutdown")
CLAIMS = {
    "a service that has no task yet": ([A], [], {"a": 2}),
    "one that waits": ([A], [task(A, "pending")], {"a": 2}),
    "one that runs counts once": ([A], [task(A, "running", where="id of x", given=("GPU-1", "GPU-2"))], {"a": 2}),
    "one that failed and comes back": ([A], [task(A, "failed", where="id of x", desired="shutdown")], {"a": 2}),
    "one that is done": ([A], [ENDED], {}),
    "one that is stopped": ([service("a", 2, "node.hostname==x", replicas=0)], [], {}),
    "one that stops still": ([], [task(A, "running", where="id of x", desired="remove", given=("GPU-1",))], {"a": 1}),
    "one pinned by id": ([service("a", 1, "node.id==id of x")], [], {"a": 1}),
    "one elsewhere": ([service("a", 1, "node.hostname==y")], [], {}),
    "the run's own": ([service("mine", 2, "node.hostname==x")], [], {}),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_others_have_claimed(name: str) -> None:
    services, tasks, claimed = CLAIMS[name]
    found = supplies([node("x"), node("y")], services, tasks, KIND, but="mine")["id of x"]
    assert found == Supply("x", 2, claimed)
    assert found.free == 2 - sum(claimed.values())


def place(run: str, index: int, *, first: int | None = None, second: int = 0, kind: str = KIND) -> dict[str, Any]:
    labels = {"swarmtrain.queue.run": run, "swarmtrain.queue.kind": kind, "swarmtrain.queue.wants": '{"node.hostname==x": 1}'}
    labels |= {} if first is None else {"swarmtrain.queue.place": str(first)}
    return {"ID": run, "Version": {"Index": index}, "UpdatedAt": f"2026-11-21T10:00:{second:02}.123456789Z", "Spec": {"Labels": labels}}


def test_places_are_in_the_order_in_which_they_were_made_however_often_they_are_renewed() -> None:
    places = [place("b", 90, first=20, second=30), place("a", 95, first=10, second=28), place("mine", 40, second=31), place("late", 50)]
    assert ahead(places, Need("mine", KIND), 30) == [Need("a", KIND, {"node.hostname==x": 1}), Need("b", KIND, {"node.hostname==x": 1})]


def test_a_place_that_stands_still_or_is_for_something_else_counts_no_more() -> None:
    places = [place("dead", 10, second=1), place("other", 11, second=40, kind="FPGA"), place("mine", 40, second=45)]
    assert ahead(places, Need("mine", KIND), 30) == []
    assert [need.run for need in ahead(places, Need("mine", KIND), 60)] == ["dead"]


def test_a_node_that_waits_is_told_for_whom() -> None:
    found = {KIND: [Supply("x", 2, {"a": 1, "": 1}), Supply("y", 2, {"b": 1})]}
    pending = TaskState("node0", "x", "pending", "no suitable node (insufficient resources on 1 node)")
    assert waiting(pending, found).reason == f"{pending.reason}; a has 1 of 2 NVIDIA-GPU; another has 1 of 2 NVIDIA-GPU"
    running = TaskState("node1", "y", "running")
    assert waiting(running, found) == running
