"""Deploy with hosts that are missing, or that refuse to start their node, on a real swarm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from swarm_helpers import DISCARD, NODES, RUN, is_run_removed, list_task_ids, run_docker

from swarmtrain.errors import NodesRefused
from swarmtrain.lab import Lab
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan

FOLDER = "/mnt/own/missing-hosts"


@contextmanager
def drained_node(lab: Lab, node: str) -> Iterator[None]:
    run_docker(lab, "node", "update", "--availability", "drain", node)
    try:
        yield
    finally:
        run_docker(lab, "node", "update", "--availability", "active", node)


def list_states(launcher: SwarmLauncher) -> dict[str, str]:
    return {task.node: task.state for task in launcher.list_tasks(RUN)}


def wait_for_state(launcher: SwarmLauncher, node: str, state: str) -> None:
    end = time.monotonic() + 60
    while list_states(launcher)[node] != state:
        assert time.monotonic() < end, launcher.list_tasks(RUN)
        time.sleep(0.3)


def test_a_missing_node_waits_and_starts_by_itself(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    with drained_node(lab, "node2"):
        plan = plan_run(nodes=3)
        assert [(node.name, node.host, node.missing_reason) for node in plan.missing_nodes] == [("node2", "node2", "drained")]
        messages: list[str] = []
        launcher.deploy_run(plan, messages.append)
        assert list_states(launcher) == {"node0": "running", "node1": "running", "node2": "pending", "rendezvous": "running"}
        assert not [message for message in messages if "node2" in message and "waiting" in message]
        assert launcher.plan_changes(plan) == []
        tasks = list_task_ids(launcher._engine)
    wait_for_state(launcher, "node2", "running")
    assert launcher.plan_changes(plan_run(nodes=3)) == []
    assert list_task_ids(launcher._engine) == tasks  # no node was restarted


def test_scaling_up_proceeds_with_a_node_that_is_missing(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    launcher.deploy_run(plan_run(nodes=1), DISCARD)
    with drained_node(lab, "node1"):
        plan = plan_scaled_run(launcher, RUN, ScaleRequest(3))
        launcher.deploy_run(plan, DISCARD)
        assert {node.name: node.host for node in plan.nodes} == {"node0": "node0", "node1": "node2", "node2": "node1"}
        assert list_states(launcher) == {"node0": "running", "node1": "running", "node2": "pending", "rendezvous": "running"}
    wait_for_state(launcher, "node2", "running")


@pytest.fixture
def folder_on_two_nodes(lab: Lab) -> Iterator[str]:
    """A folder that exists on node0 and node1, but not on node2."""
    folders = {node: lab.get_node_disk(node) / FOLDER.rpartition("/")[2] for node in NODES}
    for node in ("node0", "node1"):
        folders[node].mkdir()
    yield FOLDER
    for path in folders.values():
        if path.exists():
            path.rmdir()


def test_a_node_that_is_refused_does_not_undo_a_deploy(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], folder_on_two_nodes: str
) -> None:
    mounts = ((folder_on_two_nodes, "/data"),)
    with pytest.raises(NodesRefused, match=f"node2 on node2: .*bind source path does not exist: {FOLDER}") as raised:
        launcher.deploy_run(plan_run(nodes=3, min_nodes=3, mounts=mounts), DISCARD)
    assert raised.value.reasons.keys() == {"node2"}
    assert is_run_removed(lab, launcher._engine)
    messages: list[str] = []
    launcher.deploy_run(plan_run(nodes=3, mounts=mounts), messages.append)
    [refusal] = [message for message in messages if "the run starts without it" in message]
    assert refusal.startswith("node2 on node2: ")
    assert "To fix it: create the folder on every node" in refusal
    assert {node: state for node, state in list_states(launcher).items() if node != "node2"} == {
        "node0": "running",
        "node1": "running",
        "rendezvous": "running",
    }
    (lab.get_node_disk("node2") / FOLDER.rpartition("/")[2]).mkdir()
    wait_for_state(launcher, "node2", "running")
