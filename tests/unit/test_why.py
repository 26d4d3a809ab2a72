"""Why a run failed is a function of its events, tasks and lines; these tests compare the printed screen."""

from __future__ import annotations

import time

import pytest

from swarmtrain import protocol
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.protocol import Event
from swarmtrain.view.why import diagnose_failure, find_root_cause

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nOSError: [Errno 28] No space left on device\n'
PEER_FAILURE = {"node": "node0", "rank": 0, "exit_code": 1, "error": "RuntimeError: Connection closed by peer [10.0.0.3]", "traceback": ""}
DISK_FULL_FAILURE = {"node": "node1", "rank": 3, "exit_code": 1, "error": "OSError: [Errno 28] No space left on device", "traceback": TRACE}
EVENTS = [
    Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 900.0),
    Event(protocol.EVENT_WORLD_FORMED, {"world_size": 4, "nodes": 2}, 910.0),
    Event(protocol.EVENT_FAILURE, {"node": "node0", "rank": 1, "exit_code": 1, "error": "of a world before"}, 920.0),
    Event(protocol.EVENT_WORLD_FORMED, {"world_size": 4, "nodes": 2}, 930.0),
    Event(protocol.EVENT_PROGRESS, {"step": 120, "steps": 400, "loss": 2.5}, 990.0),
    Event(protocol.EVENT_FAILURE, PEER_FAILURE, 1000.5),
    Event(protocol.EVENT_FAILURE, DISK_FULL_FAILURE, 1000.0),
    Event(protocol.EVENT_OUTCOME, {"status": "failed", "reason": "node1 rank 3: full; failed once", "exit_code": 1}, 1003.0),
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
def _use_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_one_screen_shows_which_rank_failed_first_and_why_and_what_to_do() -> None:
    assert str(diagnose_failure("demo", EVENTS, TASKS, LINES)).splitlines() == [
        "run demo: failed, node1 rank 3: full; failed once",
        "  first   node1 rank 3 on b, at 1970-01-01 00:16:40, in world 2",
        "  step    120/400, loss 2.5000",
        "  error   OSError: [Errno 28] No space left on device",
        "  exit    exit code 1",
        "  means   a disk is full",
        "  fix     run df -h on that node; lower trainer.keep_checkpoints to keep fewer checkpoints",
        "  traceback:",
        *(f"    {line}" for line in TRACE.splitlines()),
        "  last lines of node1 rank 3:",
        "    saving step 120",
        "  meanwhile:",
        "    node0 (complete): step 120/400, 10 s before; node0 rank 0 lost its connection to another rank, 0 s later",
    ]


def test_a_failure_with_a_reason_of_its_own_comes_before_its_consequences() -> None:
    first = find_root_cause(EVENTS)
    assert first is not None
    assert first.data == DISK_FULL_FAILURE
    assert find_root_cause(EVENTS[:6]) == EVENTS[5]
    assert find_root_cause(EVENTS[:2]) is None


def test_a_hint_of_the_failed_rank_is_preferred_to_the_table() -> None:
    event = Event(protocol.EVENT_FAILURE, {**DISK_FULL_FAILURE, "hint": "bring a disk"}, 1000.0)
    found = diagnose_failure("demo", [event], TASKS, [])
    assert found is not None
    assert (found.fix, found.signature, found.outcome) == ("bring a disk", "no space", "")
    assert str(found).startswith("run demo: resumed after a failure\n")


def test_a_quarantined_node_is_reported_with_what_to_do() -> None:
    out = Event(protocol.EVENT_NODE_QUARANTINED, {"node": "node1", "seconds": 3600.0, "reason": "again and again"}, 1001.0)
    found = diagnose_failure("demo", [*EVENTS[:-1], out], TASKS, LINES)
    assert found is not None
    remedy = "`docker node update --availability drain b` keeps Swarm from scheduling on its machine"
    assert found.quarantine.startswith(f"node1 is quarantined until 01:16. {remedy}; `swarmtrain stop demo`, then deploy")
    assert f"  now     {found.quarantine}\n" in str(found)
    over = diagnose_failure("demo", [*EVENTS[:-1], out, EVENTS[-1]], TASKS, LINES)
    assert over is not None
    assert not over.quarantine, "of a run that has ended nobody is left out"


GPU_FAULT = {"node": "node1", "message": "GPU 1 (0000:1b:00): Xid 79", "hint": "reset the GPU", "is_hardware": True}


def test_a_faulty_gpu_is_named_with_the_failure_that_it_caused_or_without_one() -> None:
    fault = Event(protocol.EVENT_GPU_FAULT, GPU_FAULT, 999.0)
    assert "  GPU     node1: GPU 1 (0000:1b:00): Xid 79\n" in str(diagnose_failure("demo", [*EVENTS[:5], fault, *EVENTS[5:]], TASKS, LINES))
    out = Event(protocol.EVENT_NODE_QUARANTINED, {"node": "node1", "seconds": 86400.0, "reason": "faulty: GPU 1"}, 1000.0)
    assert str(diagnose_failure("demo", [EVENTS[1], EVENTS[4], fault, out], TASKS, [])).splitlines() == [
        "run demo: resumed after a failure",
        "  first   node1 on b, at 1970-01-01 00:16:39, in world 1",
        "  step    120/400, loss 2.5000",
        "  error   GPU 1 (0000:1b:00): Xid 79",
        "  fix     reset the GPU",
        "  GPU     node1: GPU 1 (0000:1b:00): Xid 79",
        "  now     node1 is quarantined until 1970-01-02 00:16. `docker node update --availability drain b` keeps Swarm from scheduling on "
        "its machine; `swarmtrain stop demo`, then deploy, retries it immediately",
        "  meanwhile:",
        "    node0 (complete): no output",
    ]
    slow = Event(protocol.EVENT_GPU_FAULT, {**GPU_FAULT, "is_hardware": False}, 999.0)
    assert diagnose_failure("demo", [EVENTS[1], slow], [], []) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"exit_code": 137}, "exit code 137, which is SIGKILL"),
        ({"signal": "SIGKILL"}, "killed by SIGKILL, 137 as a shell exit code"),
        ({"signal": "signal 34"}, "killed by signal 34"),
        ({"exit_code": 5}, "exit code 5"),
        ({"exit_code": 200}, "exit code 200"),
    ],
)
def test_exit_codes_are_decoded(data: dict[str, object], message: str) -> None:
    found = diagnose_failure("demo", [Event(protocol.EVENT_FAILURE, {"node": "node0", **data}, 1.0)], [], [])
    assert found is not None
    assert found.exit_status == message


def test_a_node_that_fell_silent_reported_no_reason() -> None:
    gone = [
        Event(protocol.EVENT_NODE_LEFT, {"node": "node1", "exit_code": None}, 950.0),
        Event(protocol.EVENT_OUTCOME, {"status": "failed", "reason": "node1 was lost; node0 had finished by then", "exit_code": 1}, 951.0),
    ]
    found = diagnose_failure("demo", gone, TASKS, LINES)
    assert found is not None
    assert (found.rank_label, found.host, found.time, found.signature) == ("node1", "b", 950.0, "node lost")


def test_a_container_that_cannot_be_started_is_reported_by_swarm() -> None:
    tasks = [TaskState("node0", "a", "running"), TaskState("node1", "", "pending", "no suitable node (insufficient resources on 2 nodes)")]
    found = diagnose_failure("demo", EVENTS[:1], tasks, [])
    assert found is not None
    assert (found.rank_label, found.signature) == ("node1", "no node")


def test_of_a_run_in_which_nothing_failed_nothing_is_shown() -> None:
    assert diagnose_failure("demo", EVENTS[:2], TASKS, LINES) is None
    assert (
        diagnose_failure("demo", [Event(protocol.EVENT_OUTCOME, {"status": "done", "reason": "all", "exit_code": 0})], TASKS, LINES) is None
    )


def test_lines_without_a_time_are_those_of_a_local_run() -> None:
    found = diagnose_failure("demo", EVENTS, TASKS, [LogLine("node1", "step 5", 3), LogLine("node0", "step 6", 0)])
    assert found is not None
    assert found.lines == ("step 5",)
    assert found.peers[0].last == "step 6"
