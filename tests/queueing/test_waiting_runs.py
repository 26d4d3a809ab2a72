"""Runs that wait until their GPUs are free, without a scheduler, in the list of all runs."""

from __future__ import annotations

import threading
from typing import Any

from fake_swarm import FakeSwarm
from queue_cases import GPU

from swarmtrain.launchers.swarm.overviews import read_overviews
from swarmtrain.launchers.swarm.resources.gang_queue import ResourceRequest, wait_for_resources
from swarmtrain.launchers.swarm.run_lock import RunLock
from swarmtrain.protocol import LABEL_RUN, LABEL_STACK
from swarmtrain.run_identity import RunIdentity
from swarmtrain.view.run_table import build_run_table

_CONSTRAINT = "node.hostname==gpu-0"


def test_a_run_that_waits_for_gpus_is_queued_until_its_services_are_created() -> None:
    swarm: Any = FakeSwarm(1)
    reservations = {"GenericResources": [{"DiscreteResourceSpec": {"Kind": GPU, "Value": 2}}]}
    template = {"Resources": {"Reservations": reservations}, "Placement": {"Constraints": [_CONSTRAINT]}}
    holder = {"Name": "other", "Labels": {}, "TaskTemplate": template, "Mode": {"Replicated": {"Replicas": 1}}}
    holder_id = swarm.post("/services/create", holder)["ID"]
    request = ResourceRequest("second", GPU, {_CONSTRAINT: 2}, identity=RunIdentity("id-second", "anna", "desk", 60.0))
    labels = {LABEL_STACK: "second", LABEL_RUN: "second"}
    is_waiting, has_resources = threading.Event(), threading.Event()

    def deploy() -> None:
        lock = RunLock(swarm, "second", "is deploying it")
        with lock.hold_lock(lambda _line: None), wait_for_resources(swarm, request, lock, lambda _line: is_waiting.set()):
            swarm.post("/services/create", {**holder, "Name": "second_node0", "Labels": labels})
        has_resources.set()

    thread = threading.Thread(target=deploy, daemon=True)
    thread.start()
    assert is_waiting.wait(10)
    table = build_run_table([("swarm", overview) for overview in read_overviews(swarm)], 180.0)
    assert [line.rstrip() for line in str(table).splitlines()] == [
        "RUN     ID         OWNER  NODES  STATE   STEP  AGE",
        f"second  id-second  anna   0/1    queued        2 min 00 s  waits until all of its {GPU} are free",
    ]
    swarm.delete(f"/services/{holder_id}")
    assert has_resources.wait(10)
    (overview,) = read_overviews(swarm)
    assert (overview.run, [task.state for task in overview.tasks]) == ("second", ["new"])
    assert [item["Spec"]["Name"] for item in swarm.list_objects("/configs")] == []
