"""A status that is looked at again and again: while the manager is away it says so, and goes on."""

from __future__ import annotations

from collections.abc import Callable

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
