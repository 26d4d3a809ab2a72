"""The queue on a real swarm of three machines: its scheduler is the real service; what the runs' containers do does not matter here."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from swarm_helpers import DISCARD, print_line, promote_nodes, run_docker

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import EngineError, RunNotFound
from swarmtrain.images.image_client import follow_build_output
from swarmtrain.images.pinning import build_content_tag
from swarmtrain.lab import Lab
from swarmtrain.launchers.base import QUEUED_STATE, TaskState
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry, find_queue_entry
from swarmtrain.launchers.swarm.queue.submission import SCHEDULER_SERVICE
from swarmtrain.planning.plan import build_plan
from swarmtrain.queueing import queue_service
from swarmtrain.queueing.request_checks import check_queue_request
from swarmtrain.view.dashboard.cluster_reader import ClusterReader

_LONG = 60.0


class Queue:
    """The commands of a user, and what the swarm runs."""

    def __init__(self, lab: Lab, image: str, manager: str = "node0") -> None:
        self.lab, self.image, self.manager = lab, image, manager
        self.launcher = SwarmLauncher(lab.get_docker_host(manager))
        self.engine = DockerEngine(lab.get_docker_host(manager))

    def submit(self, run: str, **runner: Any) -> None:
        """Do what `deploy --detach` does, with the stub image."""
        settings = {"nodes": 1, "stop_grace": 10, "docker_config": {"docker_container": self.image}, **runner}
        config = Config.model_validate_json(json.dumps({"runner": settings}))
        cargo = Cargo((RunFile.from_content("training_code.py", b"train()\n"),))
        plan = build_plan(config, self.launcher.read_inventory(config.runner), cargo, run=run)
        findings = [*self.launcher.check_plan(plan), *check_queue_request(self.launcher, plan)]
        assert [finding for finding in findings if finding.fatal] == []
        self.launcher.deploy_run(plan, print_line)

    def read_entry(self, run: str) -> QueueEntry:
        entry = find_queue_entry(cluster_state.list_services(self.engine, run), run)
        assert entry is not None
        return entry

    def count_running(self) -> dict[str, int]:
        """Return the number of running nodes of each run."""
        counts = {}
        for run in self.launcher.list_runs():
            with contextlib.suppress(RunNotFound):
                counts[run] = sum(task.state == "running" and task.node != "rendezvous" for task in self.launcher.list_tasks(run))
        return {run: count for run, count in counts.items() if count}

    def wait_for(self, expected: dict[str, int], seconds: float = _LONG) -> None:
        """Wait until exactly these numbers of nodes run. Each machine must have one node at most all the time."""
        deadline = time.monotonic() + seconds
        while (found := self.count_running()) != expected:
            self.check_no_double_allocation()
            assert time.monotonic() < deadline, f"{found}, expected {expected}; {run_docker(self.lab, 'service', 'ls', node=self.manager)}"
            time.sleep(0.5)
        self.check_no_double_allocation()

    def check_no_double_allocation(self) -> None:
        """Check that no machine runs the nodes of two runs: each node of these runs needs all cores of its machine."""
        nodes = [task for task in cluster_state.list_tasks_of_runs(self.engine) if task.node_name != "rendezvous"]
        machines = [task.node_id for task in nodes if task.state == "running"]
        assert len(machines) == len(set(machines)), machines


@pytest.fixture
def queue(lab: Lab, engine: DockerEngine, image: str, stub_image: str) -> Iterator[Queue]:
    """A queue whose scheduler runs. Runs that a test leaves are removed, and the scheduler, too."""
    queue_service.start_scheduler(engine, image, print_line)
    queue = Queue(lab, stub_image)
    yield queue
    for run in {*queue.launcher.list_runs(), *queue.launcher.list_terminating_runs()}:
        with contextlib.suppress(RunNotFound):
            queue.launcher.tear_down_run(run, DISCARD)
    with contextlib.suppress(subprocess.CalledProcessError):  # its machine may be one that was lost
        print_line(run_docker(lab, "service", "logs", "--raw", SCHEDULER_SERVICE))
    queue_service.remove_scheduler(engine, DISCARD)


def test_runs_wait_their_turn_and_give_way_to_a_higher_priority(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.submit("elastic", nodes=3, min_nodes=1)
    queue.wait_for({"elastic": 3})
    queue.submit("second", nodes=3)
    tasks = queue.launcher.list_tasks("second")
    assert [task.state for task in tasks] == [QUEUED_STATE] * 4
    queue.submit("urgent", nodes=2, priority="high")
    queue.wait_for({"elastic": 1, "urgent": 2})
    assert queue.read_entry("second").state == "waiting"
    monkeypatch.setenv("DOCKER_HOST", queue.engine.address)
    check_cluster_page()
    queue.launcher.tear_down_run("elastic", DISCARD)
    queue.wait_for({"urgent": 2})
    queue.launcher.tear_down_run("urgent", DISCARD)
    queue.wait_for({"second": 3})
    queue.launcher.stop_run("second", DISCARD)
    queue.wait_for({})
    time.sleep(3)
    queue.wait_for({})
    assert queue.read_entry("second").reason == "stopped by a user"
    queue.submit("second", nodes=3)
    queue.wait_for({"second": 3})


def check_cluster_page() -> None:
    """Check that the dashboard's page of this swarm shows what the scheduler has done."""
    page = ClusterReader().read_page()
    assert page.problems == ()
    assert page.queue
    assert page.queue.scheduler
    assert page.queue.scheduler.state == "running"
    assert {(row.run, row.state, row.nodes) for row in page.queue.runs} == {
        ("urgent", "running", 2),
        ("elastic", "running", 1),
        ("second", "waiting", 0),
    }
    assert {(row.run, row.running_nodes) for row in page.runs} == {("urgent", 2), ("elastic", 1), ("second", 0)}
    assert sorted(allocation.user for machine in page.machines for allocation in machine.allocations) == ["elastic", "urgent", "urgent"]
    assert [(machine.name, machine.state, machine.cores_allocated) for machine in page.machines] == [
        (f"node{number}", "ready", machine.cores) for number, machine in enumerate(page.machines)
    ]


_CONTAINER_CHECK = """
import pathlib, socket
problems = []
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
problems += [f"{{name}} {{status[name]}}" for name in ("CapEff", "CapBnd") if int(status[name], 16)]
try:
    pathlib.Path("/written").write_text("")
    problems.append("/ is writable")
except OSError:
    pass
for address in {addresses}:
    try:
        socket.create_connection((address, 2377), timeout=3)
        problems.append(f"{{address}} is reachable")
    except OSError:
        pass
print(problems)
"""


def test_the_scheduler_has_the_socket_and_nothing_else(queue: Queue) -> None:
    """Seen from its container: no capabilities, no files to write outside /tmp, no way to a machine, as to a manager's port 2377."""
    container = run_docker(queue.lab, "ps", "-q", "--filter", f"name={SCHEDULER_SERVICE}").strip()
    addresses = [machine.address for machine in cluster_state.read_inventory(queue.engine).machines]
    check = _CONTAINER_CHECK.format(addresses=addresses)
    assert run_docker(queue.lab, "exec", container, "python3", "-c", check).strip() == "[]"


@pytest.mark.test_all_only("kills the scheduler many times; one that dies at any write is in tests/queueing/test_scheduler.py")
def test_a_scheduler_that_dies_again_and_again_loses_nothing(queue: Queue) -> None:
    """Whatever it was doing: runs keep running, nothing is allocated twice, and everything is as it would have been."""
    queue.submit("low", nodes=2, priority="low")
    queue.submit("elastic", nodes=3, min_nodes=1)
    deadline = time.monotonic() + 120
    kills = 0
    while kills < 20:
        containers = run_docker(queue.lab, "ps", "-q", "--filter", f"name={SCHEDULER_SERVICE}").split()
        for container in containers:
            with contextlib.suppress(Exception):  # it has ended meanwhile
                run_docker(queue.lab, "kill", container)
                kills += 1
        if kills == 5:
            queue.submit("urgent", nodes=2, priority="high")
        if kills == 12:
            queue.submit("later", nodes=1)
        queue.check_no_double_allocation()
        time.sleep(0.7)
        assert time.monotonic() < deadline + 120
    queue.wait_for({"urgent": 2, "elastic": 1}, seconds=120)
    queue.launcher.tear_down_run("urgent", DISCARD)
    queue.wait_for({"elastic": 2, "later": 1}, seconds=120)
    queue.launcher.tear_down_run("elastic", DISCARD)
    queue.wait_for({"low": 2, "later": 1}, seconds=120)


@pytest.mark.test_all_only("waits until a lock is stale; that a scheduler without the lock changes nothing is in tests/queueing")
def test_of_two_schedulers_one_acts_and_the_other_takes_over(queue: Queue) -> None:
    def list_acting() -> list[str]:
        containers = run_docker(queue.lab, "ps", "-q", "--filter", f"name={SCHEDULER_SERVICE}").split()
        return [container for container in containers if "scheduling" in run_docker(queue.lab, "logs", container)]

    def wait_for_acting() -> str:
        deadline = time.monotonic() + _LONG
        while not (acting := list_acting()):  # its container has started, but perhaps not its program
            assert time.monotonic() < deadline
            time.sleep(0.5)
        [container] = acting
        return container

    first = wait_for_acting()
    run_docker(queue.lab, "service", "scale", f"{SCHEDULER_SERVICE}=2")
    queue.submit("demo", nodes=2)
    queue.wait_for({"demo": 2})
    assert list_acting() == [first]
    run_docker(queue.lab, "kill", first)
    queue.submit("other", nodes=1)
    queue.wait_for({"demo": 2, "other": 1})
    assert wait_for_acting() != first


@pytest.mark.test_all_only("waits until a swarm notices that a manager is lost; that Swarm then restarts services is its own claim")
def test_a_lost_manager_loses_nothing(create_lab: Callable[[str], Lab], image: str, stub_image: str) -> None:
    """The client, the leader of the managers and perhaps the scheduler are on it. The queue continues through another manager."""
    lab = create_lab("managers")
    lab.bring_up(3, report_progress=print_line)
    promote_nodes(lab, "node1", "node2")
    queue_service.start_scheduler(DockerEngine(lab.get_docker_host("node0")), image, print_line)
    queue = Queue(lab, stub_image)
    for run in ("first", "second"):
        queue.submit(run, hosts=["node1", "node2"], nodes=None)
    queue.wait_for({"first": 2})
    lab.power_off_node("node0", report_progress=DISCARD)
    remaining = Queue(lab, stub_image, "node1")
    deadline = time.monotonic() + 60
    while True:
        try:
            remaining.launcher.tear_down_run("first", print_line)
            break
        except EngineError:  # the managers elect a leader
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    remaining.wait_for({"second": 2}, seconds=180)
    lab.tear_down(report_progress=print_line)


def _get_states(tasks: list[TaskState]) -> dict[str, str]:
    return {task.node: task.state for task in tasks}


def test_a_drained_machine_gives_its_node_to_another(queue: Queue) -> None:
    queue.submit("demo", nodes=2)
    queue.wait_for({"demo": 2})
    hosts = {task.host for task in queue.launcher.list_tasks("demo") if task.node != "rendezvous"}
    drained = sorted(hosts - {"node0"})[0]
    run_docker(queue.lab, "node", "update", "--availability", "drain", drained)
    try:
        deadline = time.monotonic() + _LONG
        while True:
            tasks = queue.launcher.list_tasks("demo")
            running = {task.host for task in tasks if task.node != "rendezvous" and task.state == "running"}
            if len(running) == 2 and drained not in running:
                break
            assert time.monotonic() < deadline, _get_states(tasks)
            time.sleep(0.5)
    finally:
        run_docker(queue.lab, "node", "update", "--availability", "active", drained)


def test_a_run_of_before_the_queue_keeps_running_and_counts(
    lab: Lab, engine: DockerEngine, image: str, stub_image: str, request: pytest.FixtureRequest
) -> None:
    before = Queue(lab, stub_image)
    before.submit("before", nodes=2)
    before.wait_for({"before": 2})
    queue: Queue = request.getfixturevalue("queue")
    queue.submit("demo", nodes=2)
    time.sleep(5)
    queue.wait_for({"before": 2})
    assert "allocated to before" in queue.read_entry("demo").reason
    ids = {task.id for task in cluster_state.list_tasks(engine, "before")}
    queue.submit("before", nodes=2)
    assert {task.id for task in cluster_state.list_tasks(engine, "before")} == ids, "the run gets an entry, and is not restarted"
    assert queue.read_entry("before").state == "admitted"
    queue.launcher.tear_down_run("before", DISCARD)
    queue.wait_for({"demo": 2})


def test_an_image_that_a_machine_cannot_pull_does_not_block_the_queue(queue: Queue, make_missing: Callable[[], str]) -> None:
    queue.submit("broken", nodes=3, docker_config={"docker_container": make_missing()})
    queue.submit("demo", nodes=3)
    queue.wait_for({"demo": 3}, seconds=120)
    entry = queue.read_entry("broken")
    assert entry.state == "stopped"
    assert "cannot be started" in entry.reason


@pytest.fixture
def make_missing(engine: DockerEngine, stub_image: str) -> Callable[[], str]:
    """Return a function that builds an image which only the manager's engine has, and returns its name."""

    def make() -> str:
        dockerfile = f"FROM {stub_image}\nLABEL made={time.time_ns()}\n".encode()
        tag = "swarmtrain-missing:latest"
        stream = engine.client.build(fileobj=io.BytesIO(dockerfile), tag=tag, rm=True, decode=True)
        follow_build_output(stream, location=tag, report_progress=print_line)
        name = build_content_tag(tag, str(engine.client.inspect_image(tag)["Id"]))
        engine.client.tag(tag, *name.split(":"))
        return name

    return make
