"""A run's status is a function of its events and tasks; these tests compare what it prints."""

from __future__ import annotations

import pytest

from swarmtrain import wire
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.view.status import duration, status
from swarmtrain.view.stream import follow
from swarmtrain.wire import Event

TASKS = [TaskState("node0", "a", "running"), TaskState("rendezvous", "a", "pending", "no suitable node")]
TRAINING = [
    Event(wire.WORLD, {"world_size": 3, "nodes": 3}),
    Event(wire.PROGRESS, {"step": 10, "steps": 40, "loss": 2.5, "tokens_per_second": 12345.6, "eta_seconds": 125}),
    Event(wire.CHECKPOINT, {"step": 10, "path": "runs/x/step-00000010", "seconds": 0.2}),
    Event(wire.FAILURE, {"node": "node1", "rank": 1, "signal": "SIGKILL", "error": "killed by SIGKILL"}),
]


def test_a_training_run() -> None:
    assert str(status("demo", TRAINING, TASKS)) == (
        "run demo: training\n"
        "  world       3 ranks on 3 nodes\n"
        "  step        10/40, loss 2.5000, 12,346 tokens/s, 2 min 05 s left\n"
        "  checkpoint  step 10 in runs/x/step-00000010\n"
        "  failures    1 so far\n"
        "  NODE        HOST  STATE\n"
        "  node0       a     running\n"
        "  rendezvous  a     pending  no suitable node"
    )


def test_a_verdict_decides_the_state() -> None:
    failed = status("demo", [*TRAINING, Event(wire.VERDICT, {"status": "failed", "why": "it broke", "exit_code": 7})], TASKS)
    assert (failed.state, failed.why, failed.exit_code) == ("failed", "it broke", 7)
    assert status("demo", [], TASKS).state == "starting"
    assert status("demo", TRAINING, [TaskState("node0", "a", "stopped")]).state == "stopped"


def test_following_tells_apart_data_and_talk(capsys: pytest.CaptureFixture[str]) -> None:
    updates = [
        LogLine("node1", "hello", rank=1),
        LogLine("node1", "no rank"),
        *TRAINING,
        TASKS[1],
        TASKS[1],
        Event(wire.VERDICT, {"status": "done", "why": "finished", "exit_code": 0}),
    ]
    verdict = follow(updates)
    out, err = capsys.readouterr()
    assert verdict is not None
    assert verdict.done
    assert out == "node1 rank 1 | hello\nnode1 | no rank\n"
    assert err.splitlines() == [
        "· a world of 3 ranks on 3 nodes has formed",
        "· saved step 10 in 0 s: runs/x/step-00000010",
        "· node1 rank 1 failed: killed by SIGKILL",
        "· rendezvous on a: pending, no suitable node",
        "· done: finished",
    ]


def test_why_a_run_failed_is_left_to_who_asked(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = follow([Event(wire.VERDICT, {"status": "failed", "why": "no data", "exit_code": 1, "hint": "bring it"})])
    assert verdict is not None
    assert (verdict.why, verdict.hint) == ("no data", "bring it")
    assert capsys.readouterr().err == ""


def test_durations() -> None:
    assert [duration(value) for value in (0.4, 59.7, 185, 7830)] == ["0 s", "1 min 00 s", "3 min 05 s", "2 h 10 min"]
