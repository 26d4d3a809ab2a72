"""`why`, `status` and `history` name what caused each fault of the chaos table, not a rank that failed because of it.

The events and tasks are those of real runs (tests/fault_suspects.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fault_suspects import SUSPECTS, find_suspect, read_recording

from swarmtrain.launchers.base import TaskExit, TaskState
from swarmtrain.protocol import (
    EVENT_FAILURE,
    EVENT_NODE_JOINED,
    EVENT_NODE_LEFT,
    EVENT_WORLD_FORMED,
    EXIT_PLANNED,
    Event,
    is_collateral_failure,
)
from swarmtrain.view.history import build_history_entries
from swarmtrain.view.status import build_status
from swarmtrain.view.why import diagnose_failure
from swarmtrain.view.worlds import list_worlds

RELIABILITY_PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md"
# Texts that only torch and gloo write.
LIBRARY_TEXT = re.compile(r"GLHF|gloo|/pytorch/|\.cc:\d+|RuntimeError|Read error|DistNetworkError|callback", re.IGNORECASE)


def test_each_fault_of_the_chaos_table_has_an_expected_suspect() -> None:
    table = RELIABILITY_PAGE.read_text().partition("| fault |")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == list(SUSPECTS)


@pytest.mark.parametrize("fault", SUSPECTS)
def test_why_names_what_caused_the_fault(fault: str) -> None:
    events, tasks = read_recording(fault)
    suspect = find_suspect(str(diagnose_failure("run", events, tasks, [])))
    assert re.fullmatch(SUSPECTS[fault], suspect), suspect


@pytest.mark.parametrize("fault", SUSPECTS)
def test_why_names_it_after_the_run_is_down_too(fault: str) -> None:
    """The tasks are gone then, and their exit codes with them."""
    events, _ = read_recording(fault)
    suspect = find_suspect(str(diagnose_failure("run", events, [], [])))
    assert re.fullmatch(SUSPECTS[fault], suspect), suspect


@pytest.mark.parametrize("fault", SUSPECTS)
def test_no_text_of_torch_or_gloo_is_in_status_and_history(fault: str) -> None:
    events, tasks = read_recording(fault)
    texts = [str(build_status("run", events, tasks, events[-1].time)), *(world.reason for world in list_worlds(events))]
    texts += [entry.text for entry in build_history_entries(events)]
    assert [text for text in texts if LIBRARY_TEXT.search(text)] == []


def test_the_recordings_contain_text_of_torch_that_could_be_shown() -> None:
    failures = [event.data for fault in SUSPECTS for event in read_recording(fault)[0] if event.kind == EVENT_FAILURE]
    assert sum(bool(LIBRARY_TEXT.search(str(failure["error"]))) for failure in failures if is_collateral_failure(failure)) > 10


def build_world(time: float, **ranks: list[int]) -> Event:
    return Event(EVENT_WORLD_FORMED, {"world": str(time), "world_size": len(ranks), "nodes": len(ranks), "ranks": ranks}, time)


def build_failure(time: float, world: float, node: str, rank: int, error: str, **data: str) -> Event:
    failure = {"node": node, "rank": rank, "world": str(world), "error": f"RuntimeError: [tcp/pair.cc:78] {error}", "exit_code": 1}
    return Event(EVENT_FAILURE, {**failure, **data}, time)


def list_events_of_a_cut_link() -> list[Event]:
    """node2 can be reached in one direction only, and the other two go on without it."""
    return [
        *(Event(EVENT_NODE_JOINED, {"node": node}, 1.0) for node in ("node0", "node1", "node2")),
        build_world(2.0, node2=[0], node0=[1], node1=[2]),
        build_failure(30.0, 2.0, "node1", 2, "Timed out waiting 10000ms for send operation to complete"),
        build_failure(30.1, 2.0, "node0", 1, "Timed out waiting 10000ms for recv operation to complete"),
        build_world(32.0, node0=[0], node1=[1]),
    ]


def test_ranks_that_stop_for_a_node_that_returns_do_not_blame_each_other() -> None:
    """As when a link was cut one way: node2 comes back to a world of two, whose ranks stop one after the other, to start again with it."""
    events = [
        *list_events_of_a_cut_link(),
        build_failure(50.0, 32.0, "node1", 1, "Connection closed by peer [10.128.4.2]:1", peer="node0"),
        build_world(55.0, node0=[0], node1=[1], node2=[2]),
    ]
    assert find_suspect(str(diagnose_failure("run", events, [], []))) == "node2"
    assert list_worlds(events)[2].reason == "node2 joined"


@pytest.mark.parametrize("exit_time", [31.0, 33.0, 40.0])
def test_a_container_that_is_ended_when_its_node_returns_does_not_explain_why_the_others_lost_it(exit_time: float) -> None:
    """An engine ends the container of a node that was down when it returns: before or after the other nodes go on without it."""
    node2_left = Event(EVENT_NODE_LEFT, {"node": "node2", "exit_code": EXIT_PLANNED}, exit_time)
    events = sorted([*list_events_of_a_cut_link(), node2_left], key=lambda event: event.time)
    events += [Event(EVENT_NODE_JOINED, {"node": "node2"}, 41.0), build_world(45.0, node0=[0], node1=[1], node2=[2])]
    assert find_suspect(str(diagnose_failure("run", events, [], []))) in ("node2", "node2 rank 0")


def test_a_node_that_is_stopped_while_all_wait_for_each_other_was_lost_before() -> None:
    """With a link that is cut one way, the node that others cannot reach may wait for them too."""
    events = list_events_of_a_cut_link()
    events.insert(-1, build_failure(30.2, 2.0, "node2", 0, "Timed out waiting 10000ms for recv operation to complete"))
    events.insert(-1, Event(EVENT_NODE_LEFT, {"node": "node2", "exit_code": EXIT_PLANNED}, 31.0))
    assert find_suspect(str(diagnose_failure("run", events, [], []))) == "node2"


def test_a_node_that_is_stopped_and_that_no_rank_waited_for_is_no_failure() -> None:
    events = [event for event in list_events_of_a_cut_link() if event.kind != EVENT_FAILURE]
    events.insert(-1, Event(EVENT_NODE_LEFT, {"node": "node2", "exit_code": EXIT_PLANNED}, 31.0))
    assert diagnose_failure("run", events, [], []) is None


def test_a_container_that_was_restarted_before_the_first_world_is_no_failure() -> None:
    restarted = Event(EVENT_NODE_JOINED, {"node": "node0"}, 2.0)
    world = Event(EVENT_WORLD_FORMED, {"world": "w", "world_size": 1, "nodes": 1, "ranks": {"node0": [0]}}, 9.0)
    tasks = [TaskState("node0", "a", "running", exits=(TaskExit("node0", 1.0, 1, "task: non-zero exit (1)"),))]
    assert diagnose_failure("run", [replace(restarted, time=0.5), restarted, world], tasks, []) is None


def test_a_killed_container_is_named_with_its_exit_code_and_its_peers_are_named_by_node() -> None:
    text = str(diagnose_failure("run", *read_recording("a container is killed"), []))
    assert "  error   its container was killed\n  exit    exit code 137, which is SIGKILL\n" in text
    assert "node0 rank 1 lost its connection to node2" in text
