"""Watching a status: while the manager is unreachable, the watch reports it and continues."""

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

from swarmtrain import protocol
from swarmtrain.errors import EngineError, RunNotFound, SwarmtrainError
from swarmtrain.launchers.base import TaskState
from swarmtrain.protocol import Event
from swarmtrain.view.live_status import watch_status
from swarmtrain.view.status import RunStatus, build_status

UP = [
    Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 90.0),
    Event(protocol.EVENT_WORLD_FORMED, {"world_size": 1, "nodes": 1}, 100.0),
]
DONE = Event(protocol.EVENT_OUTCOME, {"status": "done", "reason": "all steps", "exit_code": 0}, 150.0)
LOST = EngineError("does not answer", place="the manager at tcp://a")


def build_running_status(*extra_events: Event) -> RunStatus:
    return build_status("demo", [*UP, *extra_events], [TaskState("node0", "a", "running")], 120.0)


def build_poll(*answers: RunStatus | SwarmtrainError) -> Callable[[], RunStatus]:
    """Return a poll function that gives `answers` one after the other."""
    remaining = list(answers)

    def poll() -> RunStatus:
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]  # one more poll may be in progress at the end
        if isinstance(answer, SwarmtrainError):
            raise answer
        return answer

    return poll


def test_each_change_is_shown_and_so_is_that_the_manager_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    found = watch_status(build_poll(build_running_status(), build_running_status(), LOST, build_running_status(DONE)), interval=0.3)
    assert found is not None
    assert found.state == "done"
    screens = capsys.readouterr().out.strip().split("\n\n")
    assert [screen.splitlines()[0] for screen in screens if screen.startswith("run")] == [
        "run demo: training for 30 s",
        "run demo: training for 30 s",
        "run demo: done after 1 min 00 s, all steps",
    ]
    away = [screen for screen in screens if screen.startswith("status not updated for")]
    assert [screen.partition(": ")[2] for screen in away] == ["the manager at tcp://a: does not answer; retrying every 0 s"]


def test_a_run_that_is_taken_down_meanwhile_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch_status(build_poll(build_running_status(), RunNotFound("unknown run")), interval=0.1) is None
    assert capsys.readouterr().out.startswith("run demo: training")


def test_where_there_is_nothing_to_show_the_reason_is_printed() -> None:
    for error in (LOST, RunNotFound("unknown run")):
        with pytest.raises(type(error), match=error.message):
            watch_status(build_poll(error), interval=0.1)


def test_on_a_terminal_a_progress_bar_is_shown() -> None:
    """On a pseudo-terminal of eighty columns, with what it shows at the end."""
    script = """
from swarmtrain.view.status import build_status
from swarmtrain.view.live_status import watch_status
from swarmtrain.protocol import Event
running = [Event("coordinator", {}, 90.0), Event("progress", {"step": 30, "steps": 120, "loss": 2.5, "eta_seconds": 65}, 100.0)]
ended = [*running, Event("outcome", {"status": "failed", "reason": "no luck", "exit_code": 1}, 110.0)]
answers = [running, running, ended]
watch_status(lambda: build_status("demo", answers.pop(0) if len(answers) > 1 else answers[0], [], 105.0), interval=0.2)
"""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 80))
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # raised by a terminal whose last writer is gone
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    assert process.wait(20) == 0
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in shown.decode().splitlines()]
    bars = [line for line in lines if line.startswith("━")]
    assert bars[0].partition(" ")[2].strip() == "25 %  1 min 05 s left"
    assert bars[-1].partition(" ")[2].strip() == "25 %"
    assert "step        30/120, loss 2.5000, 1 min 05 s left" in lines
