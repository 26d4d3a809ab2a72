"""GPUs that other runs have reserved, without a scheduler: a deploy is refused, or waits with --wait, and two deploys never share GPUs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from fake_swarm import FakeSwarm
from queue_cases import GPU

from swarmtrain.errors import ResourcesReserved, StackError
from swarmtrain.launchers.swarm.resources.reservation import ResourceRequest, reserve_resources
from swarmtrain.protocol.run_identity import RunIdentity

_CONSTRAINT = "node.hostname==gpu-0"


def build_service(run: str, count: int) -> dict[str, Any]:
    reservations = {"GenericResources": [{"DiscreteResourceSpec": {"Kind": GPU, "Value": count}}]}
    template = {"Resources": {"Reservations": reservations}, "Placement": {"Constraints": [_CONSTRAINT]}}
    labels = {"com.docker.stack.namespace": run, **RunIdentity(f"id-{run}", "anna").labels}
    return {"Name": f"{run}_node0", "Labels": labels, "TaskTemplate": template, "Mode": {"Replicated": {"Replicas": 1}}}


def reserve_and_create(swarm: Any, run: str, count: int) -> None:
    with reserve_resources(swarm, ResourceRequest(run, GPU, {_CONSTRAINT: count}), lambda _line: None) as check_reservation:
        check_reservation()
        swarm.post("/services/create", build_service(run, count))


def test_reserved_gpus_are_refused_with_their_run_and_owner() -> None:
    swarm: Any = FakeSwarm(1)
    reserve_and_create(swarm, "first", 1)
    with pytest.raises(ResourcesReserved) as caught:
        reserve_and_create(swarm, "second", 2)
    assert caught.value.plain_text == (
        f"error: run second: not all of its {GPU} are free: gpu-0 has 2, 2 requested, 1 reserved by first of anna\n"
        "hint: deploy with --wait to wait until they are free, or start a scheduler that queues runs: swarmtrain queue up\n"
    )
    reserve_and_create(swarm, "second", 1)
    assert sorted(item["Spec"]["Name"] for item in swarm.list_objects("/services")) == ["first_node0", "second_node0"]
    assert swarm.list_objects("/configs") == [], "no lock and no place in a queue remains"


def test_more_gpus_than_a_node_declares_are_not_waited_for() -> None:
    with pytest.raises(StackError, match=f"node gpu-0: has 2 {GPU}, and 3 are requested") as caught:
        reserve_and_create(FakeSwarm(1), "first", 3)
    assert not isinstance(caught.value, ResourcesReserved)


class SlowSwarm(FakeSwarm):
    """A swarm whose answers take so long that two deploys that check at the same time would both find the GPUs free."""

    def list_objects(self, api_path: str, **filters: str) -> list[dict[str, Any]]:
        objects = super().list_objects(api_path, **filters)
        time.sleep(0.2)
        return objects


def test_of_two_concurrent_deploys_one_gets_the_gpus() -> None:
    swarm = SlowSwarm(1)
    refused: list[str] = []

    def deploy(run: str) -> None:
        try:
            reserve_and_create(swarm, run, 2)
        except ResourcesReserved:
            refused.append(run)

    threads = [threading.Thread(target=deploy, args=(run,), daemon=True) for run in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (service,) = swarm.list_objects("/services")
    assert [f"{run}_node0" for run in ("first", "second") if run not in refused] == [service["Spec"]["Name"]]
