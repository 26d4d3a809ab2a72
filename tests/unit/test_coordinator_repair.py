"""When a launcher that follows a run replaces its coordinator. The lab has the repair itself (tests/lab/test_unresolved_coordinator.py)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.container_logs import ContainerLogLine
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.cluster_state import Service, Task
from swarmtrain.launchers.swarm.following.coordinator_repair import CoordinatorRepair
from swarmtrain.launchers.swarm.following.state_poller import SwarmSnapshot

COMMAND = "docker service update --force demo_rendezvous"
LINE = "swarmtrain: cannot resolve the name of the coordinator rendezvous for 30 s: [Errno -2] Name or service not known"


class Engine:
    """An engine that records the updates, and refuses them if it has an error."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, int, str]] = []
        self.error: EngineError | None = None

    def post(self, path: str, body: dict[str, Any], params: dict[str, str], *, image: str) -> None:
        if self.error:
            raise self.error
        self.updates.append((path, body["TaskTemplate"]["ForceUpdate"], params["version"]))
        assert image == body["TaskTemplate"]["ContainerSpec"]["Image"]


class FollowedRun:
    """A run of one node that is followed, with a clock."""

    def __init__(self) -> None:
        self.engine, self.now = Engine(), 1000.0
        self.repair = CoordinatorRepair(cast("DockerEngine", self.engine), "demo", lambda: self.now)

    def take_snapshot(self, state: str = "running", task_id: str = "first") -> None:
        spec = {"Name": "demo_rendezvous", "Mode": {}, "TaskTemplate": {"ForceUpdate": 2, "ContainerSpec": {"Image": "job:1"}}}
        task = Task(task_id, "s1", "n1", state, "running", "", None, "2026-11-21T10:01:00Z")
        self.repair.observe_snapshot(SwarmSnapshot([Service("s1", 7, spec)], [task], {}))

    def report(self, text: str = LINE) -> str:
        return self.repair.handle_line(ContainerLogLine("node1", "", "", text, 2))


@pytest.fixture
def run() -> FollowedRun:
    run = FollowedRun()
    run.take_snapshot()
    run.now += 20
    return run


def test_a_running_coordinator_that_a_node_cannot_find_is_replaced_at_most_once_in_5_min(run: FollowedRun) -> None:
    message = run.report()
    assert message.startswith("node1 cannot resolve the name of the coordinator, which runs: it is replaced")
    assert message.endswith(COMMAND)
    assert run.engine.updates == [("/services/s1/update", 3, "7")]
    run.now += 299
    assert run.report() == ""
    run.now += 1
    assert run.report() != ""
    assert len(run.engine.updates) == 2


def test_a_coordinator_that_is_starting_or_has_just_started_is_not_replaced(run: FollowedRun) -> None:
    run.take_snapshot("preparing", "second")
    run.now += 60
    assert run.report() == ""
    run.take_snapshot("running", "second")
    run.now += 19
    assert run.report() == ""
    run.now += 1
    assert run.report() != ""


@pytest.mark.parametrize("text", ["step 5", f"[rank 0] {LINE}", LINE.replace("rendezvous", "gpu-1")])
def test_other_lines_change_nothing(run: FollowedRun, text: str) -> None:
    assert run.report(text) == ""
    assert run.engine.updates == []


def test_without_permission_the_command_is_printed(run: FollowedRun) -> None:
    run.engine.error = EngineError("the engine refused POST: forbidden", place="engine", status=403)
    assert run.report().endswith(f"replace it with: {COMMAND} (the engine refused POST: forbidden)")
    assert run.report() == ""
