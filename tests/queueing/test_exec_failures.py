"""A container whose program the kernel cannot start ends the run after 5 attempts; one whose agent has started never does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_swarm import FakeSwarm
from test_scheduler import Cluster

from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.convergence import find_exec_failures
from swarmtrain.launchers.swarm.following.update_stream import LogScope, watch_run
from swarmtrain.protocol import EVENT_OUTCOME, Event
from swarmtrain.protocol.run_identity import RunIdentity

EXEC_ERROR = "exec /sbin/docker-init: argument list too long"
QUEUE_LABEL_PREFIX = "swarmtrain.queue."


class LogStream:
    """The log of a service, with one line per attempt."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for number, line in enumerate(self._lines):
            yield 1, f"2026-01-01T00:00:{number:02d}.000000000Z com.docker.swarm.task.id=t{number} {line}\n".encode()

    def close(self) -> None:
        pass


class SwarmWithLogs(FakeSwarm):
    """A swarm in memory whose nodes print `lines`, and whose tasks fail with exit code 1."""

    lines: tuple[str, ...] = ()

    def open_log_stream(self, api_path: str, _params: Any) -> LogStream:
        service = self.objects["services"][api_path.split("/")[2]]
        return LogStream(list(self.lines) if service["Spec"]["Labels"]["swarmtrain.role"] == "node" else [])

    def fail_containers(self, run: str, nodes: int, times: int = 5, seconds: int = 5) -> None:
        """Let the containers of the first `nodes` nodes fail `times` times, `seconds` apart."""
        names = {f"{run}_node{index}" for index in range(nodes)}
        for number in range(times):
            self.advance()
            for task in self.tasks:
                if task["ServiceName"] in names and task["Status"]["State"] == "running":
                    task["Status"] = {"State": "failed", "Err": "task: non-zero exit (1)", "ContainerStatus": {"ExitCode": 1}}
                    task["CreatedAt"] = (
                        f"2026-01-01T{number * seconds // 3600:02d}:{number * seconds // 60 % 60:02d}:{number * seconds % 60:02d}Z"
                    )


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.swarm = SwarmWithLogs(4)
    cluster.restart_scheduler()
    return cluster


def start_run(cluster: Cluster, **runner: Any) -> None:
    """Start the run "demo" on two nodes."""
    cluster.submit("demo", nodes=2, **runner)
    cluster.settle()
    assert cluster.running == {"demo": 2}


def list_refused_nodes(cluster: Cluster) -> list[str]:
    services, tasks = cluster_state.list_services(cluster.swarm, "demo"), cluster_state.list_tasks(cluster.swarm, "demo")
    hosts = cluster_state.read_host_names(cluster.swarm)
    return [refusal.service for refusal in find_exec_failures(cluster.swarm, "demo", services, tasks, hosts)]


@pytest.mark.parametrize("line", [EXEC_ERROR, "exec /usr/bin/python3: exec format error"])
def test_five_failed_starts_in_ten_minutes_are_a_refusal(cluster: Cluster, line: str) -> None:
    start_run(cluster)
    cluster.swarm.lines = (line,) * 4
    cluster.swarm.fail_containers("demo", 2, times=4)
    assert list_refused_nodes(cluster) == []
    cluster.swarm.lines = (line,) * 5
    cluster.swarm.fail_containers("demo", 2, times=1)
    assert list_refused_nodes(cluster) == ["node0", "node1"]


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [((EXEC_ERROR,) * 5, 200), ((*(EXEC_ERROR,) * 4, "node node0 joins"), 5), (("Traceback", "exec(code)"), 5), ((), 5)],
    ids=["too far apart", "the agent has started", "the agent fails", "no output"],
)
def test_other_failures_of_containers_are_not_limited(cluster: Cluster, lines: tuple[str, ...], seconds: int) -> None:
    start_run(cluster)
    cluster.swarm.lines = lines
    cluster.swarm.fail_containers("demo", 2, seconds=seconds)
    assert list_refused_nodes(cluster) == []


def test_the_scheduler_stops_a_run_whose_containers_cannot_start(cluster: Cluster) -> None:
    start_run(cluster)
    cluster.swarm.lines = (EXEC_ERROR,) * 5
    cluster.swarm.fail_containers("demo", 2)
    cluster.settle()
    entry = cluster.read_entry("demo")
    assert entry.state == "stopped"
    assert entry.reason.startswith(f"cannot be started: node0 on gpu-0: {EXEC_ERROR}")


def watch_outcome(cluster: Cluster) -> Event | None:
    """Follow the run until its outcome, for at most 12 s, and return it."""
    deadline = time.monotonic() + 12
    updates = watch_run(cluster.swarm, RecordedRun("demo", RunIdentity("id-demo")), LogScope())
    for update in updates:
        if isinstance(update, Event) and update.kind == EVENT_OUTCOME:
            return update
        if time.monotonic() > deadline:
            break
    return None


def make_independent_of_the_queue(cluster: Cluster) -> None:
    for service in cluster.swarm.objects["services"].values():
        labels = service["Spec"]["Labels"]
        service["Spec"]["Labels"] = {name: value for name, value in labels.items() if not name.startswith(QUEUE_LABEL_PREFIX)}


def test_following_a_run_whose_containers_cannot_start_ends_it(cluster: Cluster) -> None:
    start_run(cluster)
    make_independent_of_the_queue(cluster)
    cluster.swarm.lines = (EXEC_ERROR,) * 5
    cluster.swarm.fail_containers("demo", 2)
    outcome = watch_outcome(cluster)
    assert outcome is not None
    assert outcome.data["reason"] == f"cannot be started: node0 on gpu-0: {EXEC_ERROR}; node1 on gpu-1: {EXEC_ERROR}"
    cluster.swarm.advance()
    assert all(not service.replicas for service in cluster_state.list_services(cluster.swarm, "demo") if service.is_node)


def test_a_run_continues_on_the_nodes_that_can_start(cluster: Cluster) -> None:
    start_run(cluster, min_nodes=1)
    cluster.swarm.lines = (EXEC_ERROR,) * 5
    cluster.swarm.fail_containers("demo", 1)
    cluster.settle()
    assert cluster.read_entry("demo").state == "admitted"
