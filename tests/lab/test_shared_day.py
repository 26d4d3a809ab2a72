"""One day of a cluster that three people share: seven training runs, a preemption, and a lost node, scheduler and manager.

The test prints the timeline, and checks each loss of each run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import run_audit
from swarm_helpers import DISCARD, print_line, promote_nodes, run_docker
from training_helpers import ROOT, assert_same_losses, build_options, is_done, is_past_the_middle, read_losses

from swarmtrain import process
from swarmtrain.errors import EngineError, SwarmtrainError
from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry, find_queue_entry
from swarmtrain.launchers.swarm.queue.submission import SCHEDULER_SERVICE
from swarmtrain.protocol import EVENT_FAILURE, EVENT_PROGRESS, Event
from swarmtrain.protocol.run_identity import OWNER_VARIABLE
from swarmtrain.queueing import queue_service

pytestmark = pytest.mark.test_all_only("seven training runs; each part is in tests/lab/test_queue.py and tests/queueing")

_STEPS = 240
_DAY_SECONDS = 900.0


class Day:
    """What happens on a cluster of four machines, three of which are managers, with the time since its start."""

    def __init__(self, lab: Lab, image: str, state_folder: Path) -> None:
        self.lab, self._image, self._state_folder = lab, image, state_folder
        self._started_at = time.monotonic()
        self._seen: dict[str, str] = {}
        self.runs: list[str] = []
        self.manager = "node0"
        self._done: set[str] = set()

    @property
    def launcher(self) -> SwarmLauncher:
        return SwarmLauncher(self.lab.get_docker_host(self.manager))

    def log(self, text: str) -> None:
        print_line(f"{time.monotonic() - self._started_at:6.1f} s  {text}")

    def submit(self, owner: str, run: str, nodes: int, *settings: str) -> None:
        """Deploy a training run as `owner`, who then closes the laptop."""
        sizes = f"runner.nodes={nodes}", f"runner.max_nodes={nodes}", f"trainer.train_iterations={_STEPS}"
        sizes = (*sizes, *(() if any("min_nodes" in item for item in settings) else (f"runner.min_nodes={nodes}",)))
        argv = ["deploy", "examples/quickstart.yml", "--detach", "--name", run, *build_options(self._image, run, *sizes, *settings)]
        environment = {OWNER_VARIABLE: owner, "XDG_STATE_HOME": str(self._state_folder / owner)}
        environment["DOCKER_HOST"] = self.lab.get_docker_host(self.manager)
        process.run_command([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT, env=environment, timeout=120)
        self.runs.append(run)
        self.log(f"{owner} submits {run}: {nodes} nodes {' '.join(settings)}")

    def read_entry(self, run: str) -> QueueEntry:
        entry = find_queue_entry(cluster_state.list_services(DockerEngine(self.lab.get_docker_host(self.manager)), run), run)
        assert entry is not None
        return entry

    def is_done(self, run: str) -> bool:
        """Return whether the run was done at some time. Swarm starts a coordinator again whose machine is lost before it has exited."""
        if run not in self._done and is_done(self.read_events(run)):
            self._done.add(run)
        return run in self._done

    def read_events(self, run: str) -> list[Event]:
        return self.launcher.read_events(run)

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = 240) -> None:
        """Wait until `condition` holds, and log each change of a run's state."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(SwarmtrainError):  # the managers elect a leader
                self._log_changes()
                if condition():
                    self.log(what)
                    return
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.5)

    def _log_changes(self) -> None:
        for run in self.runs:
            entry = self.read_entry(run)
            hosts = ", ".join(sorted(task.host for task in self.launcher.list_tasks(run) if task.node in entry.machines))
            text = f"{run} is {entry.state}" + (f" on {hosts}" if hosts else f": {entry.reason}" if entry.reason else "")
            if self._seen.get(run) != text:
                self._seen[run] = text
                self.log(text)

    def count_ready_machines(self) -> int:
        inventory = cluster_state.read_inventory(DockerEngine(self.lab.get_docker_host(self.manager)))
        return sum(not machine.unavailable_reason for machine in inventory.machines)

    def has_progress(self, run: str) -> bool:
        return any(event.kind == EVENT_PROGRESS for event in self.read_events(run))


@pytest.fixture
def day(create_lab: Callable[[str], Lab], image: str, tmp_path: Path) -> Iterator[Day]:
    lab = create_lab("day")
    lab.bring_up(4, report_progress=print_line)
    promote_nodes(lab, "node1", "node2")
    engine = DockerEngine(lab.get_docker_host("node0"))
    queue_service.start_scheduler(engine, image, print_line)
    yield Day(lab, image, tmp_path)
    lab.tear_down(report_progress=DISCARD)


def test_a_day(day: Day) -> None:
    """Every run ends with the losses of an undisturbed one, and no step is lost except to the lost machine."""
    day.submit("anna", "thesis", 2)
    day.submit("bert", "sweep", 2, "runner.min_nodes=1", "runner.priority=low")
    day.wait_for("both train", lambda: is_past_the_middle(day.read_events("thesis")) and is_past_the_middle(day.read_events("sweep")))

    day.submit("carla", "paper", 4)
    submitted_at = time.monotonic()
    day.submit("bert", "urgent", 3, "runner.priority=high")
    day.wait_for("urgent makes its first step", lambda: day.has_progress("urgent"))
    print_line(f"the first step of urgent came {time.monotonic() - submitted_at:.1f} s after its submission to a full cluster")
    day.submit("anna", "control", 2)
    day.submit("carla", "notebook", 1, "runner.priority=low")

    [scheduler] = _find_scheduler_containers(day.lab)
    process.run_command(["docker", "-H", day.lab.get_docker_host(scheduler[0]), "kill", scheduler[1]])
    day.log("the scheduler is killed")
    day.wait_for("urgent is done", lambda: day.is_done("urgent"))
    day.wait_for("thesis continues", lambda: day.read_entry("thesis").state == "admitted")

    day.lab.power_off_node("node3", report_progress=DISCARD)
    day.log("node3 loses its power")
    day.wait_for("thesis is done", lambda: day.is_done("thesis"))
    day.lab.power_on_node("node3", report_progress=DISCARD)
    day.log("node3 is back")

    day.lab.power_off_node("node0", report_progress=DISCARD)
    day.manager = "node1"
    day.log("node0, the leader of the managers, loses its power")
    day.wait_for("the other managers have a leader, which knows the machines", lambda: day.count_ready_machines() == 3)
    day.submit("anna", "late", 1)
    day.wait_for("node0 counts as down", lambda: bool(cluster_state.read_down_nodes(DockerEngine(day.lab.get_docker_host("node1")))))
    day.lab.power_on_node("node0", report_progress=DISCARD)
    day.log("node0 is back")
    for run in day.runs:
        day.wait_for(f"{run} is done", lambda run=run: day.is_done(run), _DAY_SECONDS)  # type: ignore[misc]  # bound per run
    _check_runs(day)


def _check_runs(day: Day) -> None:
    reference = read_losses(day.lab, "control")
    for run in day.runs:
        losses = read_losses(day.lab, run)
        assert_same_losses(losses, reference, _STEPS)
        lost = run_audit.read_audit(day.lab.shared_disk / run / "audit").lost_steps
        failures = sum(event.kind == EVENT_FAILURE for event in day.read_events(run))
        print_line(
            f"{run}: {len(losses)} steps, {lost} recomputed, {failures} failures, {day.read_entry(run).lost_steps} lost by the queue"
        )
        assert day.read_entry(run).lost_steps == 0, run


def _find_scheduler_containers(lab: Lab) -> list[tuple[str, str]]:
    """Return (machine, container) of each running container of the scheduler."""
    found = []
    for node in ("node0", "node1", "node2"):
        with contextlib.suppress(EngineError):
            ids = run_docker(lab, "ps", "-q", "--filter", f"name={SCHEDULER_SERVICE}", node=node).split()
            found += [(node, container) for container in ids]
    return found
