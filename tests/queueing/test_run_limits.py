"""The policy for idle GPUs, on usage events as the coordinator logs them."""

from __future__ import annotations

from typing import Any

import pytest
from test_scheduler import Cluster

from swarmtrain.config.schema.queue_policy import IdleAction, IdlePolicy
from swarmtrain.protocol import EVENT_USAGE, Event
from swarmtrain.queueing import run_limits
from swarmtrain.queueing.queue_state import QueueMember, QueueReader
from swarmtrain.queueing.run_limits import IdleGpuMonitor


@pytest.fixture
def utilizations() -> dict[str, list[int]]:
    """The utilization of the GPUs by node, which the last usage event contains."""
    return {"node0": [90, 90], "node1": [90, 90]}


@pytest.fixture
def monitor(utilizations: dict[str, list[int]]) -> IdleGpuMonitor:
    def read_events(_member: QueueMember) -> list[Event]:
        nodes: dict[str, Any] = {node: {"gpus": [{"utilization": value} for value in values]} for node, values in utilizations.items()}
        return [Event(EVENT_USAGE, {"nodes": nodes})]

    return IdleGpuMonitor(read_events)


def read_member(cluster: Cluster) -> QueueMember:
    return QueueReader(cluster.swarm).read_state(cluster.now).members["demo"]


def test_idle_gpus_are_reported_or_released_after_the_time_of_the_policy(
    monitor: IdleGpuMonitor, utilizations: dict[str, list[int]]
) -> None:
    cluster = Cluster()
    cluster.submit("demo", nodes=2)
    cluster.settle()
    member, policy = read_member(cluster), IdlePolicy(after=600.0)
    assert monitor.find_change(member, policy, 0.0) is None
    utilizations |= {"node0": [0, 4], "node1": [0, 0]}
    assert [monitor.find_change(member, policy, now) for now in (30.0, 300.0, 629.0)] == [None] * 3
    reported = monitor.find_change(member, policy, 630.0)
    assert reported is not None
    assert (reported.state, reported.reason) == ("admitted", "all its GPUs have been idle for 10m or longer")
    released = monitor.find_change(member, IdlePolicy(after=600.0, action=IdleAction.release), 660.0)
    assert released is not None
    assert (released.state, released.machines) == ("stopped", {})


def test_one_busy_gpu_is_enough_and_ends_the_report(monitor: IdleGpuMonitor, utilizations: dict[str, list[int]]) -> None:
    cluster = Cluster()
    cluster.submit("demo", nodes=2)
    cluster.settle()
    member, policy = read_member(cluster), IdlePolicy(after=60.0)
    utilizations |= {"node0": [0, 5], "node1": [0, 0]}
    assert [monitor.find_change(member, policy, now) for now in (0.0, 60.0, 120.0)] == [None] * 3
    utilizations["node0"] = [0, 0]
    monitor.find_change(member, policy, 150.0)
    reported = monitor.find_change(member, policy, 210.0)
    assert reported is not None
    utilizations["node0"] = [0, 60]
    cluster.swarm.objects["services"][member.coordinator.id]["Spec"]["Labels"] |= reported.to_labels()
    ended = monitor.find_change(read_member(cluster), policy, 240.0)
    assert ended is not None
    assert ended.reason == ""


def test_a_run_without_gpus_is_not_observed(monitor: IdleGpuMonitor, utilizations: dict[str, list[int]]) -> None:
    cluster = Cluster()
    cluster.submit("demo", nodes=2, swarm={"gpu": "none"})
    cluster.settle()
    utilizations |= {"node0": [0, 0], "node1": [0, 0]}
    assert [monitor.find_change(read_member(cluster), IdlePolicy(after=1.0), now) for now in (0.0, 60.0, 120.0)] == [None] * 3


def test_a_released_run_frees_its_nodes() -> None:
    """Through the scheduler, with the policy as it is stored."""
    event = Event(EVENT_USAGE, {"nodes": {"node0": {"gpus": [{"utilization": 0}]}}})
    cluster = Cluster()
    cluster.events["demo"] = [event]
    cluster.store_policy("idle: {after: 10m, action: release}\n")
    cluster.submit("demo", nodes=4)
    cluster.submit("next", nodes=4)
    cluster.settle()
    cluster.settle(seconds=300)
    assert cluster.running == {"demo": 4}
    cluster.settle(seconds=301)
    assert cluster.running == {"next": 4}
    assert cluster.read_entry("demo").reason.startswith(run_limits.IDLE_REPORT_TEXT)
