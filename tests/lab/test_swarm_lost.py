"""The connection to the manager is lost: while a run is followed, and in the middle of every change of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from forwarder import Forwarder
from stand_in import RUN, SILENT, docker, nothing_left, say

from swarmtrain.errors import EngineError, SwarmtrainError
from swarmtrain.lab import Lab
from swarmtrain.launchers.base import LogLine, Update
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.launchers.swarm.patience import Patience
from swarmtrain.plan import Plan
from swarmtrain.wire import BOARD_UP, NOTE, Event

pytestmark = pytest.mark.test_all_only("reboots the manager again and again")

# Whoever was cut off is dead, and nothing that is pending is going to run.
HURRIED = Patience(looks=1, pending=0.0)


@pytest.fixture
def wire(lab: Lab, tmp_path: Path) -> Iterator[Forwarder]:
    with Forwarder(lab.docker_host("node0"), tmp_path / "s") as made:
        yield made


class Watch(threading.Thread):
    """Follows the run, and keeps what it sees and how it ends."""

    def __init__(self, updates: Iterable[Update]) -> None:
        super().__init__(daemon=True)
        self._updates = updates
        self._new: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self.seen: list[Update] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for update in self._updates:
                self._new.put(update)
        except SwarmtrainError as error:
            self.error = error

    def until(self, found: Callable[[Update], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while True:
            self.seen.append(self._new.get(timeout=end - time.monotonic()))
            if found(self.seen[-1]):
                return

    def notes(self) -> list[str]:
        return [str(update.data["message"]) for update in self.seen if isinstance(update, Event) and update.kind == NOTE]

    def steps(self, node: str) -> list[int]:
        texts = [update.text for update in self.seen if isinstance(update, LogLine) and update.node == node]
        return [int(text.split()[1]) for text in texts if text.startswith("step ")]


def step_after(watch: Watch, node: str, more: int) -> Callable[[Update], bool]:
    """Return what finds a line of `node` that is at least `more` steps later than the last one seen."""
    goal = max(watch.steps(node), default=0) + more
    return lambda update: isinstance(update, LogLine) and update.node == node and watch.steps(node)[-1:] >= [goal]


def test_a_manager_that_is_lost_and_found_costs_no_line_and_no_event(
    launcher: SwarmLauncher, planned: Callable[..., Plan], wire: Forwarder
) -> None:
    launcher.up(planned(), say)
    watch = Watch(SwarmLauncher(wire.address, Patience(manager=15.0)).watch(RUN))
    watch.until(step_after(watch, "node0", 3))
    for _ in range(5):
        wire.cut()
        time.sleep(0.4)
        wire.heal()
        watch.until(step_after(watch, "node1", 2))
    assert watch.notes() == []
    wire.cut()
    time.sleep(8)
    wire.heal()
    for node in ("node0", "node1"):
        watch.until(step_after(watch, node, 30))
    assert watch.notes() == ["does not answer; demo goes on, and is followed again as soon as that is possible", "answers again"]
    for node in ("node0", "node1"):
        steps = watch.steps(node)
        assert steps == list(range(steps[0], steps[0] + len(steps))), node
    assert [update.kind for update in watch.seen if isinstance(update, Event) and update.kind != NOTE] == [BOARD_UP]

    wire.cut()
    watch.join(45)
    assert isinstance(watch.error, EngineError)
    assert watch.error.place == f"the manager at {wire.address}"
    assert watch.error.message.startswith("does not answer for ")
    assert watch.error.hint == "demo goes on; follow it again with swarmtrain logs -f demo"


def test_a_reboot_of_the_manager_costs_no_line_of_the_others(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    """The board goes with it, and comes back."""
    launcher.up(planned(), say)
    watch = Watch(launcher.watch(RUN))
    watch.until(step_after(watch, "node1", 3))
    lab.kill("node0", say=say)
    try:
        watch.until(lambda update: isinstance(update, Event) and update.kind == NOTE)
    finally:
        lab.start("node0", say=say)
    watch.until(lambda update: isinstance(update, Event) and update.kind == BOARD_UP and watch.notes()[-1] == "answers again", 120)
    watch.until(step_after(watch, "node1", 5))
    steps = watch.steps("node1")
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len([update for update in watch.seen if isinstance(update, Event) and update.kind == BOARD_UP]) == 2
    assert watch.notes()[-1] == "answers again"


def broken_off(wire: Forwarder, number: int, command: Callable[[SwarmLauncher], None]) -> bool:
    """Do `command` on a wire that is cut after its request `number` that changes something; False if it has fewer.

    It must end with one error that says so.
    """
    wire.cut()
    wire.heal(cut_after=number)
    launcher = SwarmLauncher(wire.address, HURRIED)
    told: EngineError | None = None
    try:
        command(launcher)
    except EngineError as error:
        told = error
    reached = wire.changes >= number
    wire.cut()
    wire.heal()
    if reached:
        assert told is not None
        assert (told.place, bool(told.hint)) == (f"Docker engine at {wire.address}", True)
    return reached


@pytest.fixture
def nowhere(lab: Lab, planned: Callable[..., Plan]) -> Iterator[Callable[[int], Plan]]:
    """Return a function that plans a run whose containers never start, since no machine takes any: that saves their time."""
    plans = {nodes: planned(nodes=nodes) for nodes in (1, 2)}
    for availability in ("drain", "active"):
        for node in ("node0", "node1"):
            docker(lab, "node", "update", "--availability", availability, node)
        if availability == "drain":
            yield plans.__getitem__


def test_a_change_that_is_broken_off_anywhere_is_ended_by_the_same_command_again(
    lab: Lab, engine: Engine, nowhere: Callable[[int], Plan], wire: Forwarder
) -> None:
    commands: dict[str, Callable[[SwarmLauncher], None]] = {
        "up": lambda place: place.up(nowhere(1), SILENT),
        "scale": lambda place: place.up(nowhere(2), SILENT),
        "down": lambda place: place.down(RUN, SILENT),
    }
    unfinished = set(commands)
    number = 0
    while unfinished:
        number += 1
        for name, command in commands.items():
            say(f"{name}, cut after change {number}")
            if name in unfinished and not broken_off(wire, number, command):
                unfinished.remove(name)
            place = SwarmLauncher(wire.address, HURRIED)
            if name != "down" or RUN in [*place.runs(), *place.leaving()]:
                command(place)
        assert nothing_left(lab, engine)
    assert number > 8


def test_a_node_that_has_just_died_keeps_nobody_from_the_lines_of_the_others(
    lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan]
) -> None:
    """The manager waits for its part of the log for a minute and more."""
    launcher.up(planned(), say)
    watch = Watch(launcher.watch(RUN))
    watch.until(step_after(watch, "node0", 3))
    lab.kill("node1", say=say)
    try:
        for follow in (False, True):
            begun = time.monotonic()
            shown = launcher.logs(RUN, follow=follow)
            assert next(line.node for line in shown if line.text.startswith("step ")) == "node0"
            assert time.monotonic() - begun < 30
    finally:
        lab.start("node1", say=say)
