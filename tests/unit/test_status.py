"""A run's status is a function of its events and tasks; these tests compare its printed text."""

from __future__ import annotations

import re
import time

import pytest

from swarmtrain import protocol
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.protocol import EXIT_PLANNED, Event, RunOutcome
from swarmtrain.view.formatting import format_duration, parse_time
from swarmtrain.view.status import build_status, format_progress
from swarmtrain.view.update_printer import follow_updates, format_event
from swarmtrain.view.why import diagnose_failure
from swarmtrain.view.worlds import list_worlds

TASKS = [TaskState("node0", "a", "running"), TaskState("rendezvous", "a", "pending", "no suitable node")]
TRAINING = [
    Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 90.0),
    Event(protocol.EVENT_WORLD_FORMED, {"world_size": 3, "nodes": 3}, 100.0),
    Event(protocol.EVENT_PROGRESS, {"step": 10, "steps": 40, "loss": 2.5, "tokens_per_second": 12345.6, "eta_seconds": 125}, 110.0),
    Event(protocol.EVENT_CHECKPOINT, {"step": 10, "path": "runs/x/step-00000010", "seconds": 0.2}, 111.0),
    Event(protocol.EVENT_FAILURE, {"node": "node1", "rank": 1, "signal": "SIGKILL", "error": "killed by SIGKILL"}, 112.0),
]
GIB = 2**30
USED = {"cpu": 1.94, "cpus": 2.0, "memory": 1.25 * GIB, "memory_limit": 4 * GIB}
GPUS = [
    {"utilization": 93, "memory": 60 * GIB, "memory_total": 80 * GIB},
    {"utilization": 95, "memory": 60 * GIB, "memory_total": 80 * GIB},
]


def test_a_training_run() -> None:
    assert str(build_status("demo", TRAINING, TASKS, 272.0)) == (
        "run demo: training for 3 min 02 s\n"
        "  world       3 ranks on 3 nodes\n"
        "  step        10/40, loss 2.5000, 12,346 tokens/s, 2 min 05 s left\n"
        "  checkpoint  step 10 in runs/x/step-00000010, 2 min 41 s ago\n"
        "  failures    1 so far\n"
        "  NODE        HOST  STATE\n"
        "  node0       a     running\n"
        "  rendezvous  a     pending  no suitable node"
    )


@pytest.mark.parametrize(("loss", "text"), [(1.5, "1.5000"), (None, "NaN/Inf"), (float("nan"), "NaN/Inf"), ("x", "NaN/Inf")])
def test_a_non_finite_validation_loss_is_shown_as_such(loss: object, text: str) -> None:
    evaluation = Event(protocol.EVENT_EVALUATION, {"step": 10, "loss": loss}, 111.0)
    assert f"  validation  loss {text} at step 10\n" in str(build_status("demo", [*TRAINING, evaluation], TASKS, 272.0))
    assert format_event(evaluation) == f"validation loss {text} at step 10"


def test_a_custom_script_shows_its_step_without_a_total() -> None:
    assert format_progress({"step": 7, "loss": 0.25, "samples": 32}) == "7, loss 0.2500"


def test_what_nodes_use_and_why_they_were_restarted() -> None:
    later = [
        Event(protocol.EVENT_WORLD_FORMED, {"world_size": 3, "nodes": 3}, 130.0),
        Event(protocol.EVENT_USAGE, {"nodes": {"node0": {**USED, "gpus": GPUS}, "node1": USED}}, 140.0),
    ]
    tasks = [TASKS[0], TaskState("node1", "b", "running")]
    assert str(build_status("demo", [*TRAINING, *later], tasks, 190.0)).splitlines()[1:] == [
        "  world       3 ranks on 3 nodes, world 2 since 1 min 00 s: node1 rank 1 failed: killed by SIGKILL",
        "  step        10/40, loss 2.5000, 12,346 tokens/s, 2 min 05 s left",
        "  checkpoint  step 10 in runs/x/step-00000010, 1 min 19 s ago",
        "  failures    1 so far",
        "  NODE   HOST  STATE    CPU    MEMORY       GPU        GPU MEMORY       RESTARTS",
        "  node0  a     running  1.9/2  1.2/4.0 GiB  94 % of 2  120.0/160.0 GiB",
        "  node1  b     running  1.9/2  1.2/4.0 GiB                              1         killed by SIGKILL, 1 min 18 s ago",
    ]
    assert build_status("demo", [*TRAINING, *later], tasks, 1000.0).usage == {}


def test_a_quarantined_node_is_shown_until_it_may_train_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    out = Event(protocol.EVENT_NODE_QUARANTINED, {"node": "node1", "seconds": 3600.0, "reason": "the first to fail 3 times"}, 113.0)
    smaller = Event(protocol.EVENT_WORLD_FORMED, {"world_size": 2, "nodes": 2}, 130.0)
    tasks = [TASKS[0], TaskState("node1", "b", "running")]
    found = build_status("demo", [*TRAINING, out, smaller], tasks, 190.0)
    assert str(found).splitlines()[5:] == [
        "  quarantined node1: `docker node update --availability drain b` keeps Swarm from scheduling on its machine; "
        "`swarmtrain stop demo`, then deploy, retries it immediately",
        "  NODE   HOST  STATE    RESTARTS",
        "  node0  a     running",
        "  node1  b     running  1         quarantined until 01:01: the first to fail 3 times",
    ]
    assert found.to_dict()["quarantined"] == {"node1": {"until": 3713.0, "reason": "the first to fail 3 times"}}
    for back in (
        Event(protocol.EVENT_NODE_RELEASED, {"node": "node1", "reason": "its quarantine is over"}, 140.0),
        Event(protocol.EVENT_NODE_LEFT, {"node": "node1", "exit_code": EXIT_PLANNED}, 140.0),
        Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 140.0),
    ):
        assert not build_status("demo", [*TRAINING, out, back], tasks, 190.0).quarantined


def test_faults_of_gpus_are_shown_until_the_node_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    data = {"node": "node1", "message": "GPU 1 (0000:1b:00): Xid 79", "hint": "reset it", "is_hardware": True}
    fault = Event(protocol.EVENT_GPU_FAULT, data, 112.0)
    out = Event(protocol.EVENT_NODE_QUARANTINED, {"node": "node1", "seconds": 86400.0, "reason": "faulty: GPU 1"}, 113.0)
    smaller = Event(protocol.EVENT_WORLD_FORMED, {"world_size": 1, "nodes": 1, "ranks": {"node0": [0]}}, 130.0)
    tasks = [TASKS[0], TaskState("node1", "b", "running")]
    lines = str(build_status("demo", [*TRAINING, fault, out, smaller], tasks, 190.0)).splitlines()
    assert "  GPU         node1: GPU 1 (0000:1b:00): Xid 79, 1 min 18 s ago" in lines
    assert lines[-1].endswith("quarantined until 1970-01-02 00:01: faulty: GPU 1")
    stopped = Event(protocol.EVENT_NODE_LEFT, {"node": "node1", "exit_code": EXIT_PLANNED}, 140.0)
    assert build_status("demo", [*TRAINING, fault, out, stopped], tasks, 190.0).gpu_faults == ()


def test_the_rank_that_others_wait_for_is_shown_as_long_as_its_world_lives() -> None:
    message = "rank 1 on node1: other ranks wait, a step takes 31% longer, since computation is slower there"
    slow = Event(protocol.EVENT_STRAGGLER, {"rank": 1, "node": "node1", "slowdown": 0.31, "phase": "compute", "message": message}, 120.0)
    tasks = [TASKS[0], TaskState("node1", "b", "running")]
    found = build_status("demo", [*TRAINING, slow], tasks, 180.0)
    assert f"  slowest     {message} (b), since 1 min 00 s\n" in str(found)
    assert found.to_dict()["straggler"]["rank"] == 1
    keeps_up = Event(protocol.EVENT_STRAGGLER, {"rank": None, "message": "node1 is no longer a straggler"}, 150.0)
    for over in (keeps_up, TRAINING[1], Event(protocol.EVENT_OUTCOME, {"status": "done", "reason": "it is", "exit_code": 0}, 160.0)):
        assert not build_status("demo", [*TRAINING, slow, over], tasks, 180.0).straggler


def test_micro_batches_that_are_assigned_by_speed_are_shown_by_node() -> None:
    counts = {"node10": [3], "node1": [2], "node0": [4, 4]}
    progress = Event(protocol.EVENT_PROGRESS, {"step": 11, "steps": 40, "micro_batches": counts}, 120.0)
    found = build_status("demo", [*TRAINING, progress], TASKS, 180.0)
    assert "  assignment  node0 4 + 4, node1 2, node10 3 micro batches per step, by speed\n" in str(found)
    assert found.to_dict()["progress"]["micro_batches"] == counts


def test_json_has_every_field_and_what_it_means() -> None:
    found = build_status("demo", TRAINING, TASKS, 272.0).to_dict()
    assert {key: found[key] for key in ("run", "state", "time", "started", "seconds", "ended", "exit_code", "failures")} == {
        "run": "demo",
        "state": "training",
        "time": 272.0,
        "started": 90.0,
        "seconds": 182.0,
        "ended": None,
        "exit_code": None,
        "failures": 1,
    }
    assert found["restarts"] == {"node1": {"count": 1, "time": 112.0, "reason": "killed by SIGKILL"}}
    assert found["checkpoint"]["time"] == 111.0
    assert set(found) >= {"reason", "hint", "world", "worlds", "progress", "validation", "usage", "tasks"}


def test_the_outcome_decides_the_state() -> None:
    events = [*TRAINING, Event(protocol.EVENT_OUTCOME, {"status": "failed", "reason": "it broke", "exit_code": 7}, 120.0)]
    failed = build_status("demo", events, TASKS, 500.0)
    assert (failed.state, failed.reason, failed.exit_code, failed.seconds) == ("failed", "it broke", 7, 30.0)
    assert str(failed).startswith("run demo: failed after 30 s, it broke\n")
    assert build_status("demo", [], TASKS, 0.0).state == "starting"
    assert build_status("demo", TRAINING, [TaskState("node0", "a", "stopped")], 500.0).state == "stopped"
    assert (
        build_status("demo", [*events, Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 130.0)], TASKS, 500.0).state == "training"
    )


WORLD_BEFORE = Event(protocol.EVENT_WORLD_FORMED, {"world_size": 2, "nodes": 2}, 1.0)
PEER_FAILURE = Event(protocol.EVENT_FAILURE, {"node": "node0", "rank": 0, "error": "RuntimeError: Connection closed by peer"}, 2.0)


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ([Event(protocol.EVENT_NODE_JOINED, {"node": "node2"})], "node2 joined"),
        ([Event(protocol.EVENT_NODE_LEFT, {"node": "node1", "exit_code": EXIT_PLANNED})], "node1 received a stop request"),
        ([PEER_FAILURE, Event(protocol.EVENT_NODE_LEFT, {"node": "node1", "exit_code": None})], "node1 stopped sending heartbeats"),
        (
            [PEER_FAILURE, Event(protocol.EVENT_NODE_JOINED, {"node": "node1"})],
            "node0 rank 0 lost its connection to another rank",
        ),
        ([PEER_FAILURE, Event(protocol.EVENT_FAILURE, {"node": "node1", "rank": 1, "error": "boom"})], "node1 rank 1 failed: boom"),
        (
            [Event(protocol.EVENT_COORDINATOR_STARTED), Event(protocol.EVENT_NODE_JOINED, {"node": "node1"})],
            "the coordinator was restarted",
        ),
        ([], ""),
    ],
)
def test_why_a_world_came_after_another(between: list[Event], why: str) -> None:
    after = Event(protocol.EVENT_WORLD_FORMED, {"world_size": 1, "nodes": 1}, 9.0)
    assert [world.reason for world in list_worlds([Event(protocol.EVENT_COORDINATOR_STARTED), WORLD_BEFORE, *between, after])] == ["", why]


def test_a_node_that_came_too_late_for_a_world_is_the_reason_for_the_next() -> None:
    formed = [
        Event(protocol.EVENT_WORLD_FORMED, {"nodes": number + 1, "ranks": {f"node{index}": [index] for index in range(number + 1)}})
        for number in (0, 1)
    ]
    assert [world.reason for world in list_worlds(formed)] == ["", "node1 joined"]


def test_following_separates_data_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    updates = [
        LogLine("node1", "hello", rank=1),
        LogLine("node1", "no rank"),
        *TRAINING[1:],
        TASKS[1],
        TASKS[1],
        Event(protocol.EVENT_OUTCOME, {"status": "done", "reason": "finished", "exit_code": 0}),
    ]
    verdict = follow_updates(updates)
    out, err = capsys.readouterr()
    assert verdict is not None
    assert verdict.is_success
    assert out == "node1 rank 1 | hello\nnode1 | no rank\n"
    assert [re.sub(r"^· \d\d:\d\d:\d\d ", "", line) for line in err.splitlines()] == [
        "a world of 3 ranks on 3 nodes has formed",
        "node1 rank 1 failed: killed by SIGKILL",
        "rendezvous on a: pending, no suitable node",
        "done: finished",
    ]


def test_followed_events_have_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    follow_updates([TRAINING[1]])
    assert capsys.readouterr().err == "· 00:01:40 a world of 3 ranks on 3 nodes has formed\n"


def test_a_redeploy_prints_no_event_from_before_but_returns_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Event(protocol.EVENT_OUTCOME, {"status": "done", "reason": "finished", "exit_code": 0}, 120.0)
    assert follow_updates([*TRAINING, outcome], after=120.0) == RunOutcome("done", "finished", 0)
    assert capsys.readouterr().err == ""
    follow_updates([*TRAINING, outcome], after=111.0)
    assert [line.split(maxsplit=2)[2] for line in capsys.readouterr().err.splitlines()] == [
        "node1 rank 1 failed: killed by SIGKILL",
        "done: finished",
    ]


def test_an_event_and_a_line_that_say_the_same_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also if the event arrives before the line, since two logs are followed."""
    note = Event(protocol.EVENT_NOTE, {"node": "node1", "message": "skips a corrupt checkpoint"}, 10.0)
    other_note = Event(protocol.EVENT_NOTE, {"node": "node1", "message": "its limit of open files is low"}, 10.0)
    resumed = Event(protocol.EVENT_RESUMED, {"step": 10, "path": "runs/x/step-00000010"}, 11.0)
    evaluation = Event(protocol.EVENT_EVALUATION, {"step": 0, "loss": 5.35707}, 12.0)
    lines = ["WARNING skips a corrupt checkpoint", "resuming from step 10, from runs/x/step-00000010", "step  0/40  validation loss 5.3571"]
    follow_updates(
        [LogLine("node1", lines[0], 0), note, other_note, resumed, evaluation, *(LogLine("node1", line, 0) for line in lines[1:])]
    )
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"node1 rank 0 | {line}" for line in lines]
    assert [line.split(maxsplit=2)[2] for line in err.splitlines()] == ["node1: its limit of open files is low"]


def test_why_a_run_failed_is_printed_by_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = follow_updates([Event(protocol.EVENT_OUTCOME, {"status": "failed", "reason": "no data", "exit_code": 1, "hint": "bring it"})])
    assert verdict is not None
    assert (verdict.reason, verdict.hint) == ("no data", "bring it")
    assert capsys.readouterr().err == ""


def test_durations() -> None:
    assert [format_duration(value) for value in (0.4, 59.7, 185, 7830)] == ["0 s", "1 min 00 s", "3 min 05 s", "2 h 10 min"]
    assert format_duration(100 * 3600) == "4 d 4 h"


def test_points_in_time() -> None:
    assert [parse_time(text, 10_000.0) for text in ("10s", "10m", "1h30m", "0.5h")] == [9990.0, 9400.0, 4600.0, 8200.0]
    assert parse_time("2026-11-21T22:30:00+00:00", 0.0) == 1795300200.0
    with pytest.raises(SwarmtrainError, match="neither a duration nor a point in time"):
        parse_time("yesterday", 0.0)


def test_ranks_that_wait_for_their_process_group_are_named_until_it_has_formed() -> None:
    data = {"world": "b-1/10.0.0.5:4000", "world_size": 4, "address": "10.0.0.5:4000"}
    waiting = Event(protocol.EVENT_RANKS_CONNECTING, {**data, "ranks": {"node0": [0, 1], "node1": [2]}}, 120.0)
    formed = TRAINING[:2]
    text = "ranks 0-2 on node0, node1 wait for rank 0 at 10.0.0.5:4000; rank 3 has not started to connect"
    status = build_status("demo", [*formed, waiting], TASKS[:1], 272.0)
    assert (status.state, status.reason) == ("starting", text)
    diagnosis = diagnose_failure("demo", [*TRAINING, Event(protocol.EVENT_WORLD_FORMED, {}, 119.0), waiting], TASKS[:1], [])
    assert diagnosis
    assert (diagnosis.error, diagnosis.outcome) == (text, "its ranks wait for their process group")
    for later in (Event(protocol.EVENT_RANKS_CONNECTING, {**data, "ranks": {}}, 130.0), *TRAINING[1:3], TRAINING[4]):
        assert build_status("demo", [*formed, waiting, later], TASKS[:1], 272.0).state == "training"
    assert diagnose_failure("demo", [*formed, waiting, TRAINING[2]], TASKS[:1], []) is None
    complete = Event(protocol.EVENT_RANKS_CONNECTING, {**data, "ranks": {"node0": [0, 1], "node1": [2, 3]}}, 120.0)
    assert (
        build_status("demo", [*formed, complete], TASKS[:1], 272.0).reason == "ranks 0-3 on node0, node1 wait for rank 0 at 10.0.0.5:4000"
    )
