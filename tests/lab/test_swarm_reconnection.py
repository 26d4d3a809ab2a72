"""The connection to the manager is lost: while a run is followed, and during every change of it.

These tests must run after test_swarm_launcher, in the order of names. After a manager was lost and has come back, Docker 20.10 sometimes
returns no log lines of services on other nodes, or stops responding while logs are requested.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from engine_proxy import EngineProxy
from swarm_helpers import DISCARD, RUN, is_run_removed, print_line, run_docker

from swarmtrain.errors import EngineError, SwarmtrainError
from swarmtrain.lab import Lab
from swarmtrain.launchers.base import LogLine, RunUpdate
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.launchers.swarm.timeouts import SwarmTimeouts
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import EVENT_COORDINATOR_STARTED, EVENT_NOTE, Event

pytestmark = pytest.mark.test_all_only("reboots the manager again and again")

# A disconnected command counts as dead at once, and pending tasks are not waited for.
SHORT_TIMEOUTS = SwarmTimeouts(stale_lock_polls=1, pending_seconds=0.0)


@pytest.fixture
def proxy(lab: Lab, tmp_path: Path) -> Iterator[EngineProxy]:
    with EngineProxy(lab.get_docker_host("node0"), tmp_path / "s") as proxy:
        yield proxy


class WatchThread(threading.Thread):
    """Follows the run, and keeps the updates and how following ends."""

    def __init__(self, updates: Iterable[RunUpdate]) -> None:
        super().__init__(daemon=True)
        self._updates = updates
        self._queue: queue.SimpleQueue[RunUpdate] = queue.SimpleQueue()
        self.received: list[RunUpdate] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for update in self._updates:
                self._queue.put(update)
        except SwarmtrainError as error:
            self.error = error

    def wait_for_update(self, condition: Callable[[RunUpdate], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while True:
            self.received.append(self._queue.get(timeout=end - time.monotonic()))
            if condition(self.received[-1]):
                return

    def list_notes(self) -> list[str]:
        return [str(update.data["message"]) for update in self.received if isinstance(update, Event) and update.kind == EVENT_NOTE]

    def list_steps(self, node: str) -> list[int]:
        texts = [update.text for update in self.received if isinstance(update, LogLine) and update.node == node]
        return [int(text.split()[1]) for text in texts if text.startswith("step ")]


def match_step_after(watch: WatchThread, node: str, steps: int) -> Callable[[RunUpdate], bool]:
    """Return a condition that is met by a line of `node` at least `steps` steps after the last one received."""
    goal = max(watch.list_steps(node), default=0) + steps
    return lambda update: isinstance(update, LogLine) and update.node == node and watch.list_steps(node)[-1:] >= [goal]


def test_a_manager_that_is_lost_and_reconnected_loses_no_line_and_no_event(
    launcher: SwarmLauncher, plan_run: Callable[..., Plan], proxy: EngineProxy
) -> None:
    launcher.deploy_run(plan_run(), print_line)
    watch = WatchThread(SwarmLauncher(proxy.address, SwarmTimeouts(manager_seconds=15.0)).watch_run(RUN))
    watch.wait_for_update(match_step_after(watch, "node0", 3))
    for _ in range(5):
        proxy.disconnect()
        time.sleep(0.4)
        proxy.reconnect()
        watch.wait_for_update(match_step_after(watch, "node1", 2))
    assert watch.list_notes() == []
    proxy.disconnect()
    time.sleep(8)
    proxy.reconnect()
    for node in ("node0", "node1"):
        watch.wait_for_update(match_step_after(watch, node, 30))
    assert watch.list_notes() == ["does not answer; demo continues; the log stream is lost, reconnecting", "answers again"]
    for node in ("node0", "node1"):
        steps = watch.list_steps(node)
        assert steps == list(range(steps[0], steps[0] + len(steps))), node
    assert [update.kind for update in watch.received if isinstance(update, Event) and update.kind != EVENT_NOTE] == [
        EVENT_COORDINATOR_STARTED
    ]

    proxy.disconnect()
    watch.join(45)
    assert isinstance(watch.error, EngineError)
    assert watch.error.place == f"the manager at {proxy.address}"
    assert watch.error.message.startswith("does not answer for ")
    assert watch.error.hint == "demo continues; follow it again with swarmtrain logs -f demo"


def test_a_reboot_of_the_manager_loses_no_line_of_the_others(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    """The coordinator runs on the manager, so it is restarted too."""
    launcher.deploy_run(plan_run(), print_line)
    watch = WatchThread(launcher.watch_run(RUN))
    watch.wait_for_update(match_step_after(watch, "node1", 3))
    lab.power_off_node("node0", report_progress=print_line)
    try:
        watch.wait_for_update(lambda update: isinstance(update, Event) and update.kind == EVENT_NOTE)
    finally:
        lab.power_on_node("node0", report_progress=print_line)
    watch.wait_for_update(
        lambda update: isinstance(update, Event) and update.kind == EVENT_COORDINATOR_STARTED and watch.list_notes()[-1] == "answers again",
        120,
    )
    watch.wait_for_update(match_step_after(watch, "node1", 5))
    steps = watch.list_steps("node1")
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len([update for update in watch.received if isinstance(update, Event) and update.kind == EVENT_COORDINATOR_STARTED]) == 2
    assert watch.list_notes()[-1] == "answers again"


def run_with_disconnect(proxy: EngineProxy, number: int, command: Callable[[SwarmLauncher], None]) -> bool:
    """Run `command` over a connection that is dropped after changing request `number`. Return False if the command makes fewer requests.

    The command must raise exactly one error, an EngineError that names the engine and has a hint.
    """
    proxy.disconnect()
    proxy.reconnect(disconnect_after=number)
    launcher = SwarmLauncher(proxy.address, SHORT_TIMEOUTS)
    raised: EngineError | None = None
    try:
        command(launcher)
    except EngineError as error:
        raised = error
    reached = proxy.change_count >= number
    proxy.disconnect()
    proxy.reconnect()
    if reached:
        assert raised is not None
        assert (raised.place, bool(raised.hint)) == (f"Docker engine at {proxy.address}", True)
    return reached


@pytest.fixture
def plan_unschedulable_run(lab: Lab, plan_run: Callable[..., Plan]) -> Iterator[Callable[[int], Plan]]:
    """Return a function that plans a run whose containers never start, since no machine accepts tasks. That saves their start time."""
    plans = {nodes: plan_run(nodes=nodes) for nodes in (1, 2)}
    for availability in ("drain", "active"):
        for node in ("node0", "node1"):
            run_docker(lab, "node", "update", "--availability", availability, node)
        if availability == "drain":
            yield plans.__getitem__


def test_a_change_that_is_interrupted_anywhere_is_completed_by_the_same_command(
    lab: Lab, engine: DockerEngine, plan_unschedulable_run: Callable[[int], Plan], proxy: EngineProxy
) -> None:
    commands: dict[str, Callable[[SwarmLauncher], None]] = {
        "up": lambda place: place.deploy_run(plan_unschedulable_run(1), DISCARD),
        "scale": lambda place: place.deploy_run(plan_unschedulable_run(2), DISCARD),
        "down": lambda place: place.tear_down_run(RUN, DISCARD),
    }
    unfinished = set(commands)
    number = 0
    while unfinished:
        number += 1
        for name, command in commands.items():
            print_line(f"{name}, cut after change {number}")
            if name in unfinished and not run_with_disconnect(proxy, number, command):
                unfinished.remove(name)
            place = SwarmLauncher(proxy.address, SHORT_TIMEOUTS)
            if name != "down" or RUN in [*place.list_runs(), *place.list_terminating_runs()]:
                command(place)
        assert is_run_removed(lab, engine)
    assert number > 8


def test_a_node_that_has_just_died_does_not_delay_the_lines_of_the_others(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]
) -> None:
    """The manager waits for more than a minute for that node's part of the log."""
    launcher.deploy_run(plan_run(), print_line)
    watch = WatchThread(launcher.watch_run(RUN))
    watch.wait_for_update(match_step_after(watch, "node0", 3))
    lab.power_off_node("node1", report_progress=print_line)
    try:
        for follow in (False, True):
            begun = time.monotonic()
            shown = launcher.stream_logs(RUN, follow=follow)
            assert next(line.node for line in shown if line.text.startswith("step ")) == "node0"
            assert time.monotonic() - begun < 30
    finally:
        lab.power_on_node("node1", report_progress=print_line)
