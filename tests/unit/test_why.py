"""Why a run died is a function of its events, tasks and lines; these tests compare the screen."""

from __future__ import annotations

import time

import pytest

from swarmtrain import wire
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.view.why import first_failure, why
from swarmtrain.wire import Event

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nOSError: [Errno 28] No space left on device\n'
PEER = {"node": "node0", "rank": 0, "exit_code": 1, "error": "RuntimeError: Connection closed by peer [10.0.0.3]", "traceback": ""}
FULL = {"node": "node1", "rank": 3, "exit_code": 1, "error": "OSError: [Errno 28] No space left on device", "traceback": TRACE}
EVENTS = [
    Event(wire.BOARD_UP, {"run": "demo"}, 900.0),
    Event(wire.WORLD, {"world_size": 4, "nodes": 2}, 910.0),
    Event(wire.FAILURE, {"node": "node0", "rank": 1, "exit_code": 1, "error": "of a world before"}, 920.0),
    Event(wire.WORLD, {"world_size": 4, "nodes": 2}, 930.0),
    Event(wire.PROGRESS, {"step": 120, "steps": 400, "loss": 2.5}, 990.0),
    Event(wire.FAILURE, PEER, 1000.5),
    Event(wire.FAILURE, FULL, 1000.0),
    Event(wire.VERDICT, {"status": "failed", "why": "node1 rank 3: full; failed once", "exit_code": 1}, 1003.0),
]
TASKS = [TaskState("node0", "a", "complete"), TaskState("node1", "b", "complete"), TaskState("rendezvous", "a", "complete")]
LINES = [
    LogLine("node1", "an hour ago", 3, 100.0),
    LogLine("node0", "step 120/400", 0, 990.0),
    LogLine("node1", "saving step 120", 3, 999.0),
    LogLine("node1", "of another rank", 2, 999.5),
    *(LogLine("node1", line, 3, 1000.0) for line in TRACE.splitlines()),
]


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_one_screen_tells_who_was_first_and_why_and_what_to_do() -> None:
    assert str(why("demo", EVENTS, TASKS, LINES)).splitlines() == [
        "run demo: failed, node1 rank 3: full; failed once",
        "  first   node1 rank 3 on b, at 1970-01-01 00:16:40, in world 2",
        "  step    120/400, loss 2.5000",
        "  error   OSError: [Errno 28] No space left on device",
        "  exit    exit code 1",
        "  means   a disk is full",
        "  fix     df -h on that node; fewer checkpoints: trainer.keep_checkpoints",
        "  traceback:",
        *(f"    {line}" for line in TRACE.splitlines()),
        "  last lines of node1 rank 3:",
        "    saving step 120",
        "  meanwhile:",
        f"    node0 (complete): step 120/400, 10 s before; node0 rank 0 failed: {PEER['error']}, 0 s later",
    ]


def test_a_failure_with_a_reason_of_its_own_comes_before_those_in_its_wake() -> None:
    first = first_failure(EVENTS)
    assert first is not None
    assert first.data == FULL
    assert first_failure(EVENTS[:6]) == EVENTS[5]
    assert first_failure(EVENTS[:2]) is None


def test_a_hint_of_whoever_failed_is_better_than_the_tables() -> None:
    event = Event(wire.FAILURE, {**FULL, "hint": "bring a disk"}, 1000.0)
    found = why("demo", [event], TASKS, [])
    assert found is not None
    assert (found.fix, found.known, found.verdict) == ("bring a disk", "no space", "")
    assert str(found).startswith("run demo: goes on after a failure\n")


def test_a_node_that_is_left_out_is_said_to_be_with_what_to_do() -> None:
    out = Event(wire.LEFT_OUT, {"node": "node1", "seconds": 3600.0, "why": "again and again"}, 1001.0)
    found = why("demo", [*EVENTS[:-1], out], TASKS, LINES)
    assert found is not None
    remedy = "`docker node update --availability drain b` keeps a swarm off its machine"
    assert found.left_out.startswith(f"node1 is left out until 01:16. {remedy}; `swarmtrain stop demo`, then deploy")
    assert f"  now     {found.left_out}\n" in str(found)
    over = why("demo", [*EVENTS[:-1], out, EVENTS[-1]], TASKS, LINES)
    assert over is not None
    assert not over.left_out, "of a run that has ended nobody is left out"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"exit_code": 137}, "exit code 137, which is SIGKILL"),
        ({"signal": "SIGKILL"}, "killed by SIGKILL, 137 to a shell"),
        ({"signal": "signal 34"}, "killed by signal 34"),
        ({"exit_code": 5}, "exit code 5"),
        ({"exit_code": 200}, "exit code 200"),
    ],
)
def test_exit_codes_are_decoded(data: dict[str, object], told: str) -> None:
    found = why("demo", [Event(wire.FAILURE, {"node": "node0", **data}, 1.0)], [], [])
    assert found is not None
    assert found.exit == told


def test_a_node_that_fell_silent_could_not_say_why() -> None:
    gone = [
        Event(wire.LEFT, {"node": "node1", "exit_code": None}, 950.0),
        Event(wire.VERDICT, {"status": "failed", "why": "node1 was lost; node0 had finished by then", "exit_code": 1}, 951.0),
    ]
    found = why("demo", gone, TASKS, LINES)
    assert found is not None
    assert (found.who, found.host, found.time, found.known) == ("node1", "b", 950.0, "node lost")


def test_a_container_that_cannot_be_started_is_told_by_swarm() -> None:
    tasks = [TaskState("node0", "a", "running"), TaskState("node1", "", "pending", "no suitable node (insufficient resources on 2 nodes)")]
    found = why("demo", EVENTS[:1], tasks, [])
    assert found is not None
    assert (found.who, found.known) == ("node1", "no node")


def test_of_a_run_in_which_nothing_failed_there_is_nothing_to_say() -> None:
    assert why("demo", EVENTS[:2], TASKS, LINES) is None
    assert why("demo", [Event(wire.VERDICT, {"status": "done", "why": "all", "exit_code": 0})], TASKS, LINES) is None


def test_lines_without_a_time_are_those_of_a_local_run() -> None:
    found = why("demo", EVENTS, TASKS, [LogLine("node1", "step 5", 3), LogLine("node0", "step 6", 0)])
    assert found is not None
    assert found.lines == ("step 5",)
    assert found.others[0].last == "step 6"
