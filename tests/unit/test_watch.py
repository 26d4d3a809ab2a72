"""A status that is looked at again and again: while the manager is away it says so, and goes on."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmtrain import wire
from swarmtrain.errors import EngineError, RunNotFound, SwarmtrainError
from swarmtrain.launchers.base import TaskState
from swarmtrain.view.status import Status, status
from swarmtrain.view.watch import watch
from swarmtrain.wire import Event

UP = [Event(wire.BOARD_UP, {"run": "demo"}, 90.0), Event(wire.WORLD, {"world_size": 1, "nodes": 1}, 100.0)]
DONE = Event(wire.VERDICT, {"status": "done", "why": "all steps", "exit_code": 0}, 150.0)
LOST = EngineError("does not answer", place="the manager at tcp://a")


def standing(*more: Event) -> Status:
    return status("demo", [*UP, *more], [TaskState("node0", "a", "running")], 120.0)


def looks(*answers: Status | SwarmtrainError) -> Callable[[], Status]:
    """Return what gives these answers, one after the other."""
    left = list(answers)

    def look() -> Status:
        answer = left.pop(0) if len(left) > 1 else left[0]  # one more look may be under way at the end
        if isinstance(answer, SwarmtrainError):
            raise answer
        return answer

    return look


def test_each_change_is_shown_and_so_is_that_the_manager_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    found = watch(looks(standing(), standing(), LOST, standing(DONE)), every=0.3)
    assert found is not None
    assert found.state == "done"
    screens = capsys.readouterr().out.strip().split("\n\n")
    assert [screen.splitlines()[0] for screen in screens if screen.startswith("run")] == [
        "run demo: training for 30 s",
        "run demo: training for 30 s",
        "run demo: done after 1 min 00 s, all steps",
    ]
    away = [screen for screen in screens if screen.startswith("no newer")]
    assert [screen.partition(": ")[2] for screen in away] == ["the manager at tcp://a: does not answer; asked again every 0 s"]


def test_a_run_that_is_taken_down_meanwhile_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(looks(standing(), RunNotFound("there is no run of this name")), every=0.1) is None
    assert capsys.readouterr().out.startswith("run demo: training")


def test_where_there_is_nothing_to_look_at_the_reason_is_told() -> None:
    for error in (LOST, RunNotFound("there is no run of this name")):
        with pytest.raises(type(error), match=error.message):
            watch(looks(error), every=0.1)


def test_on_a_terminal_a_bar_tells_how_far_it_is() -> None:
    """A terminal of its own, eighty columns wide, and what stands on it at the end."""
    script = """
from swarmtrain.view.status import status
from swarmtrain.view.watch import watch
from swarmtrain.wire import Event
told = [Event("board", {}, 90.0), Event("progress", {"step": 30, "steps": 120, "loss": 2.5, "eta_seconds": 65}, 100.0)]
ended = [*told, Event("verdict", {"status": "failed", "why": "no luck", "exit_code": 1}, 110.0)]
answers = [told, told, ended]
watch(lambda: status("demo", answers.pop(0) if len(answers) > 1 else answers[0], [], 105.0), every=0.2)
"""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 80))
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal answers whose last writer has gone
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    assert process.wait(20) == 0
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in shown.decode().splitlines()]
    bars = [line for line in lines if line.startswith("━")]
    assert bars[0].partition(" ")[2].strip() == "25 %  1 min 05 s left"
    assert bars[-1].partition(" ")[2].strip() == "25 %"
    assert "step        30/120, loss 2.5000, 1 min 05 s left" in lines
