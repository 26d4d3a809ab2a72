"""The coordinator's rules, without sockets: calls in, events out, a simulated clock."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.entrypoint.coordinator.membership import NODE_LOST_SECONDS
from swarmtrain.entrypoint.coordinator.state_machine import (
    COLLATERAL_GRACE_SECONDS,
    LINGER_SECONDS,
    ROOT_CAUSE_SECONDS,
    STABLE_WORLD_SECONDS,
    Coordinator,
)
from swarmtrain.protocol import (
    EVENT_CHECKPOINT,
    EVENT_FAILURE,
    EVENT_GPU_FAULT,
    EVENT_NODE_JOINED,
    EVENT_NODE_LEFT,
    EVENT_NODE_QUARANTINED,
    EVENT_NODE_RELEASED,
    EVENT_NOTE,
    EVENT_OUTCOME,
    EVENT_PROGRESS,
    EVENT_SCRIPT_RETURNED,
    EVENT_TRAINING_FINISHED,
    EVENT_USAGE,
    EVENT_WORLD_FORMED,
    EXIT_PLANNED,
    PERMANENT_BEFORE_FIRST_STEP,
    Event,
    EventResponse,
    RunOutcome,
    WorldAssignment,
    WorldRequest,
)

PEER = "RuntimeError: Connection closed by peer [10.0.0.3]:4711"


class CoordinatorHarness:
    """A coordinator with recorded events and a simulated clock."""

    def __init__(self, max_restarts: int = 2, per_hour: int = 99, min_nodes: int = 9, boot_id: str = "b", **options: Any) -> None:
        self.time = 100.0
        self.events: list[Event] = []
        budget = {"max_restarts": max_restarts, "max_restarts_per_hour": per_hour, "min_nodes": min_nodes}
        self.coordinator = Coordinator(
            run="r", **budget, boot_id=boot_id, clock=lambda: self.time, publish_event=self.events.append, **options
        )

    def list_events(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind == kind]

    @property
    def outcome(self) -> RunOutcome | None:
        return self.coordinator.supervisor_response.outcome

    def post_world(self, name: str, *nodes: str) -> None:
        for index, node in enumerate(nodes):
            facts = {"world": name, "world_size": 2 * len(nodes), "nodes": len(nodes), "ranks": {node: [2 * index, 2 * index + 1]}}
            self.coordinator.handle_event(Event(EVENT_WORLD_FORMED, facts))

    def post_returned_ranks(self, world: str, node: str, *ranks: int) -> None:
        for rank in ranks:
            self.coordinator.handle_event(Event(EVENT_SCRIPT_RETURNED, {"node": node, "world": world, "rank": rank}))

    def post_failure(self, world: str, node: str = "node0", rank: int = 0, error: str = "boom", **facts: Any) -> None:
        self.coordinator.handle_event(
            Event(EVENT_FAILURE, {"world": world, "node": node, "rank": rank, "error": error, "exit_code": 1, **facts})
        )

    def post_step(self, step: int) -> None:
        self.coordinator.handle_event(Event(EVENT_PROGRESS, {"step": step}))

    def advance_time(self, seconds: float) -> None:
        self.time += seconds
        self.coordinator.process_timeouts()


@pytest.fixture
def harness() -> CoordinatorHarness:
    harness = CoordinatorHarness()
    for node in ("node0", "node1"):
        harness.coordinator.register_node(node)
    return harness


class TwoNodesInAWorld(CoordinatorHarness):
    """Two nodes whose agents are in the world `world`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.nodes = ["node0", "node1"]
        for node in self.nodes:
            self.coordinator.register_node(node)
        self.advance_time(3)  # the coordinator has heard from all nodes
        self.world = self.request_worlds()
        self.post_world(self.world, *self.nodes)

    def request_worlds(self, previous_world: str = "") -> str:
        """Request the next world for all nodes, and return its key; empty if it does not form."""
        requests = [
            WorldRequest(node, f"agent {node}", self.coordinator.round, previous_world, 2, "10.0.0.1", 4000, min_nodes=2, max_nodes=2)
            for node in self.nodes
        ]
        for node in self.nodes:
            self.coordinator.record_heartbeat(node)
        return [self.coordinator.assign_world(request) for request in requests][-1].world

    @property
    def is_world_over(self) -> bool:
        return self.coordinator.is_world_over(self.world)


def test_a_failure_ends_its_world_and_the_next_one_forms() -> None:
    harness = TwoNodesInAWorld()
    assert harness.world == "b-1/1"
    harness.post_failure("b-1/0", "node1", 2)
    assert not harness.is_world_over
    harness.post_failure(harness.world, "node1", 2)
    assert harness.is_world_over
    assert harness.request_worlds(harness.world) == "b-1/2"
    harness.post_failure(harness.world, "node0", 0, PEER)
    assert not harness.coordinator.is_world_over("b-1/2")


def test_a_world_runs_on_after_a_collateral_failure_until_its_cause_may_be_known() -> None:
    harness = TwoNodesInAWorld()
    harness.post_failure(harness.world, "node0", 0, PEER)
    assert not harness.is_world_over
    harness.advance_time(ROOT_CAUSE_SECONDS + 0.1)
    assert harness.is_world_over
    harness = TwoNodesInAWorld()
    harness.post_failure(harness.world, "node0", 0, PEER)
    harness.post_failure(harness.world, "node1", 2)
    assert harness.is_world_over


def test_ranks_that_have_left_after_a_stop_request_end_their_world_without_a_failure() -> None:
    harness = TwoNodesInAWorld(max_restarts=0)
    harness.coordinator.end_world(harness.world)
    assert harness.is_world_over
    assert harness.request_worlds(harness.world) == "b-1/2"
    assert harness.outcome is None


def test_a_lost_agent_and_a_lost_node_end_their_world() -> None:
    harness = TwoNodesInAWorld()
    harness.coordinator.handle_event(Event(EVENT_FAILURE, {"node": "node1", "round": "b-1", "signal": "SIGKILL", "error": "killed"}))
    assert harness.is_world_over
    harness = TwoNodesInAWorld()
    harness.advance_time(NODE_LOST_SECONDS - 1)
    harness.coordinator.record_heartbeat("node0")
    assert not harness.is_world_over
    harness.advance_time(2)
    assert harness.is_world_over


def test_a_run_that_is_done_lets_its_ranks_return_and_one_that_has_failed_ends_them() -> None:
    harness = TwoNodesInAWorld()
    harness.coordinator.handle_event(Event(EVENT_TRAINING_FINISHED, {"step": 1}))
    assert not harness.is_world_over
    assert harness.coordinator.assign_world(
        WorldRequest("node0", "agent", "b-1", harness.world, 2, "10.0.0.1", 4000, min_nodes=2, max_nodes=2)
    ) == WorldAssignment(is_round_over=True)
    harness = TwoNodesInAWorld()
    harness.post_failure("another world", "node0", permanent=True)
    assert harness.is_world_over


def test_an_agent_of_an_earlier_round_gets_no_world() -> None:
    harness = TwoNodesInAWorld()
    request = WorldRequest("node0", "agent", "b-1", harness.world, 2, "10.0.0.1", 4000, min_nodes=2, max_nodes=2)
    assert harness.coordinator.close_round("node1", "b-1").round == "b-2"
    assert harness.coordinator.assign_world(request).is_round_over


def test_nodes_that_close_the_same_round_start_one_new_round(harness: CoordinatorHarness) -> None:
    assert harness.coordinator.supervisor_response.round == "b-1"
    assert harness.coordinator.close_round("node0", "b-1").round == "b-2"
    assert harness.coordinator.close_round("node1", "b-1").round == "b-2"
    assert harness.coordinator.close_round("node1", "a-7").round == "b-2"
    assert harness.coordinator.record_heartbeat("node0").round == "b-2"


def test_a_world_is_published_once_all_its_nodes_are_in_it(harness: CoordinatorHarness) -> None:
    harness.coordinator.handle_event(
        Event(EVENT_WORLD_FORMED, {"world": "b-1/x:1", "world_size": 4, "nodes": 2, "ranks": {"node1": [0, 1]}})
    )
    assert not harness.list_events(EVENT_WORLD_FORMED)
    harness.post_world("b-1/x:2", "node1", "node0")
    assert [data["ranks"] for data in harness.list_events(EVENT_WORLD_FORMED)] == [{"node1": [0, 1], "node0": [2, 3]}]
    assert harness.list_events(EVENT_WORLD_FORMED)[0]["world_size"] == 4


def test_all_ranks_of_a_world_cost_one_restart(harness: CoordinatorHarness) -> None:
    for attempt in range(3):
        assert harness.outcome is None
        harness.post_world(f"b-1/x:{attempt}", "node0", "node1")
        for rank in range(4):
            harness.post_failure(f"b-1/x:{attempt}", rank=rank, error=f"boom {attempt}.{rank}")
    assert harness.outcome == RunOutcome(
        "failed", "node0 rank 0: boom 2.0; failed 3 times in a row without a new step, max_restarts is 2", 1, round="b-1"
    )
    assert len(harness.list_events(EVENT_OUTCOME)) == 1


def test_what_one_rank_reports_twice_is_published_once(harness: CoordinatorHarness) -> None:
    harness.post_world("w", "node0", "node1")
    harness.post_failure("w", error="as the rank saw it")
    harness.post_failure("w", error="as its agent saw it")
    assert [data["error"] for data in harness.list_events(EVENT_FAILURE)] == ["as the rank saw it"]


def test_a_failure_is_published_for_its_rank_no_matter_which_rank_reports_it(harness: CoordinatorHarness) -> None:
    harness.post_world("b-1/1", "node0", "node1")
    harness.post_failure("b-1/1", "node1", 3, "cannot be written", failed_rank=1, local_rank=1)
    harness.post_failure("b-1/1", "node0", 1, "cannot be written", failed_rank=1, local_rank=1)
    harness.post_failure("b-1/1", "node1", 3, "exit code 1")
    (failure,) = harness.list_events(EVENT_FAILURE)
    assert (failure["node"], failure["rank"], failure["local_rank"]) == ("node0", 1, 1)
    assert "failed_rank" not in failure


def test_a_new_step_gives_the_restarts_back_an_old_one_does_not(harness: CoordinatorHarness) -> None:
    harness.post_step(10)
    for attempt in range(2):
        harness.post_failure(f"w{attempt}")
    harness.post_step(11)
    for attempt in range(2, 4):
        harness.post_failure(f"w{attempt}")
    assert harness.outcome is None
    harness.post_step(11)
    harness.post_failure("w4")
    assert harness.outcome is not None


def test_a_world_that_lived_long_counts_as_progress_where_no_steps_are_reported(harness: CoordinatorHarness) -> None:
    for attempt in range(6):
        harness.post_world(f"w{attempt}", "node0", "node1")
        harness.advance_time(STABLE_WORLD_SECONDS)
        harness.coordinator.record_heartbeat("node0")
        harness.coordinator.record_heartbeat("node1")
        harness.post_failure(f"w{attempt}")
    assert harness.outcome is None


def test_a_run_that_comes_further_each_time_may_still_not_fail_too_often_within_an_hour() -> None:
    board = CoordinatorHarness(max_restarts=2, per_hour=5)
    for attempt in range(100):  # one failure per 15 min, each on the next machine, for 25 h
        board.post_step(attempt)
        board.post_failure(f"w{attempt}", f"node{attempt % 9}", error="killed by SIGKILL", signal="SIGKILL")
        board.time += 900
    board.time += 3600
    for attempt in range(100, 106):
        board.post_step(attempt)
        assert board.outcome is None
        board.post_failure(f"w{attempt}")
    assert board.outcome is not None
    assert board.outcome.reason.endswith("boom; failed 6 times within 1 h, max_restarts_per_hour is 5")


def test_the_same_exception_at_the_same_step_twice_in_a_row_is_a_bug() -> None:
    board = CoordinatorHarness(max_restarts=50)
    board.post_step(7)
    board.post_failure("w1", "node0", 0, PEER, step=8)
    board.post_failure("w1", "node1", 2, "ValueError: no room for 0x7f3a, of 17", step=8)
    board.post_failure("w2", "node1", 2, "ValueError: no room for 0x7f3a, of 17", step=9)
    assert board.outcome is None, "at another step"
    board.post_failure("w3", "node0", 0, PEER, step=9)
    assert board.outcome is None
    board.post_failure("w3", "node0", 1, "ValueError: no room for 0x81aa, of 18", step=9)
    assert board.outcome is not None
    assert board.outcome.reason.endswith("0x81aa, of 18; same error at the same step as before: not a machine fault")


@pytest.mark.parametrize(
    "facts",
    [
        {"signal": "SIGKILL", "error": "killed by SIGKILL"},
        {"error": PEER, "step": 8},
        {"error": "RuntimeError: CUDA error: uncorrectable ECC error encountered", "step": 8},
        {"error": "OSError: [Errno 5] Input/output error: '/data/train.bin'", "step": 8},
        {"error": "world 3 is cut off", "step": 8, "permanent": False},
        {"error": "of a script that tells no steps"},
    ],
)
def test_what_may_be_a_machines_fault_is_not_a_bug_however_often(facts: dict[str, Any]) -> None:
    board = CoordinatorHarness(max_restarts=50)
    for attempt in range(10):
        board.post_world(f"w{attempt}", "node0", "node1")
        board.post_failure(f"w{attempt}", **facts)
    board.advance_time(COLLATERAL_GRACE_SECONDS + 1)
    assert board.outcome is None


def test_two_bugs_between_which_a_machine_died_are_not_in_a_row() -> None:
    board = CoordinatorHarness(max_restarts=50)
    for attempt in range(3):
        board.post_failure(f"a{attempt}", error="boom", step=3)
        board.post_failure(f"b{attempt}", error="killed by SIGKILL", signal="SIGKILL")
    assert board.outcome is None


def test_a_flaky_node_is_named_once_an_hour_where_it_is_indispensable() -> None:
    board = CoordinatorHarness(max_restarts=50)
    for attempt, node in enumerate(["node1", "node0", "node1", "node2", "node1", "node1", "node1", "node1"]):
        board.post_failure(f"w{attempt}", node, error="killed by SIGKILL", signal="SIGKILL")
        board.post_failure(f"w{attempt}", "node0", 9, PEER)
    (note,) = board.list_events(EVENT_NOTE)
    assert note["node"] == "node1"
    assert note["message"].startswith(
        "node1 was the first to fail 5 times within 1 h, more than twice as often as all other nodes together"
    )
    board.time += 3600
    for attempt in range(3):
        board.post_failure(f"later{attempt}", f"node{attempt + 1}", error="killed by SIGKILL", signal="SIGKILL")
    assert len(board.list_events(EVENT_NOTE)) == 1


class ThreeNodeHarness(CoordinatorHarness):
    """Three nodes that send heartbeats; `min_nodes` is 2."""

    def __init__(self) -> None:
        super().__init__(max_restarts=2, min_nodes=2)
        self.nodes = ["node0", "node1", "node2"]
        for node in self.nodes:
            self.coordinator.register_node(node)
        self.advance_time(3)  # the coordinator has heard from all nodes

    def fail_bad_node(self, attempt: int, error: str = "OSError: [Errno 5] Input/output error", **facts: Any) -> None:
        """Report a failure of node2's ranks in a new world, and the resulting one of a peer."""
        self.post_world(f"w{attempt}", *self.nodes)
        self.post_failure(f"w{attempt}", "node0", 0, PEER)
        self.post_failure(f"w{attempt}", "node2", 4, error, **facts)
        self.post_failure(f"w{attempt}", "node2", 5, error, **facts)

    def send_heartbeats_for(self, seconds: float) -> None:
        for _ in range(int(seconds / 10)):
            for node in self.nodes:
                self.coordinator.record_heartbeat(node)
            self.advance_time(10)

    @property
    def quarantined(self) -> set[str]:
        """The nodes that may not join the round, although all have arrived."""
        for node in self.nodes:
            self.coordinator.close_round(node, "")
        return {node for node in self.nodes if self.coordinator.close_round(node, "").wait}


@pytest.fixture
def three_nodes() -> ThreeNodeHarness:
    return ThreeNodeHarness()


def test_a_node_whose_machine_fails_repeatedly_is_quarantined_for_an_hour(three_nodes: ThreeNodeHarness) -> None:
    for attempt in range(3):
        assert not three_nodes.quarantined
        three_nodes.fail_bad_node(attempt)
    assert three_nodes.list_events(EVENT_NODE_QUARANTINED) == [
        {
            "node": "node2",
            "seconds": 3600.0,
            "reason": "the first to fail 3 times within 1 h, more than twice as often as all other nodes together",
        }
    ]
    assert three_nodes.quarantined == {"node2"}
    assert three_nodes.coordinator.record_heartbeat("node0").round == "b-2", "the others meet in a round in which it is not"
    assert three_nodes.coordinator.close_round("node2", "b-1").wait
    assert three_nodes.coordinator.close_round("node2", "b-1").round == "b-2", "its agent's end draws no other"
    three_nodes.coordinator.register_node("node2")
    assert three_nodes.quarantined == {"node2"}, "its container, too, was started again"
    three_nodes.post_failure("w2", "node1", 3, PEER + " once more")
    assert three_nodes.outcome is None, "max_restarts is 2, and what failed three times is away"
    for attempt in range(3, 5):
        three_nodes.post_world(f"w{attempt}", "node0", "node1")
        three_nodes.post_failure(f"w{attempt}", "node0", error=f"boom {attempt}")
        assert three_nodes.outcome is None
    three_nodes.post_step(1)
    three_nodes.send_heartbeats_for(3590)
    assert three_nodes.quarantined == {"node2"}
    three_nodes.send_heartbeats_for(10)
    assert not three_nodes.quarantined
    assert three_nodes.list_events(EVENT_NODE_RELEASED) == [{"node": "node2", "reason": "its quarantine is over"}]
    three_nodes.post_world("w5", *three_nodes.nodes)
    three_nodes.post_failure("w5", "node2", 4, "killed by SIGBUS", signal="SIGBUS")
    assert not three_nodes.quarantined, "what is an hour ago is forgiven"


def test_a_bad_machine_is_better_than_none(three_nodes: ThreeNodeHarness) -> None:
    for attempt in range(3):
        three_nodes.fail_bad_node(attempt)
    three_nodes.nodes.remove("node1")
    three_nodes.send_heartbeats_for(NODE_LOST_SECONDS + 10)
    assert not three_nodes.quarantined
    assert three_nodes.list_events(EVENT_NODE_RELEASED) == [{"node": "node2", "reason": "the other nodes are fewer than min_nodes, 2"}]
    three_nodes.post_step(1)
    three_nodes.post_world("w3", "node0", "node2")
    three_nodes.post_failure("w3", "node2", 3, "killed by SIGKILL", signal="SIGKILL")
    assert not three_nodes.quarantined
    assert "min_nodes" in three_nodes.list_events(EVENT_NOTE)[0]["message"]
    three_nodes.nodes.append("node1")
    three_nodes.coordinator.register_node("node1")
    three_nodes.fail_bad_node(4)
    assert three_nodes.quarantined == {"node2"}, "at once, now that it is needed no more"


def report_gpu_fault(harness: ThreeNodeHarness, node: str, *, is_hardware: bool = True) -> None:
    data = {"node": node, "message": "GPU 1 (0000:1b:00): Xid 79", "hint": "reset it", "is_hardware": is_hardware}
    harness.coordinator.handle_event(Event(EVENT_GPU_FAULT, data))


def test_a_node_with_a_faulty_gpu_is_quarantined_for_a_day_at_once(three_nodes: ThreeNodeHarness) -> None:
    report_gpu_fault(three_nodes, "node1", is_hardware=False)
    assert not three_nodes.quarantined
    report_gpu_fault(three_nodes, "node2")
    assert three_nodes.quarantined == {"node2"}
    [event] = three_nodes.list_events(EVENT_NODE_QUARANTINED)
    assert (event["seconds"], event["reason"]) == (86400.0, "faulty: GPU 1 (0000:1b:00): Xid 79")
    assert len(three_nodes.list_events(EVENT_GPU_FAULT)) == 2
    three_nodes.coordinator.register_node("node2")
    assert three_nodes.quarantined == {"node2"}, "its container was restarted, which repairs no GPU"
    three_nodes.coordinator.record_node_exit("node2", EXIT_PLANNED)
    three_nodes.coordinator.register_node("node2")
    assert not three_nodes.quarantined, "a user has stopped it, and started it again"


def test_a_faulty_gpu_is_better_than_none_and_is_left_out_when_another_node_joins(three_nodes: ThreeNodeHarness) -> None:
    three_nodes.nodes.remove("node1")
    three_nodes.coordinator.record_node_exit("node1", EXIT_PLANNED)
    for _ in range(2):
        report_gpu_fault(three_nodes, "node2")
    assert not three_nodes.quarantined
    assert len(three_nodes.list_events(EVENT_GPU_FAULT)) == 1
    [note] = three_nodes.list_events(EVENT_NOTE)
    assert note["message"].endswith("it is not quarantined, since fewer than min_nodes would remain")
    three_nodes.nodes.append("node1")
    three_nodes.coordinator.register_node("node1")
    three_nodes.advance_time(1)
    assert three_nodes.quarantined == {"node2"}


def test_a_node_that_exited_gracefully_comes_back_with_no_failures_counted(three_nodes: ThreeNodeHarness) -> None:
    for attempt in range(3):
        three_nodes.fail_bad_node(attempt)
    three_nodes.coordinator.record_node_exit("node2", EXIT_PLANNED)
    three_nodes.coordinator.register_node("node2")
    assert not three_nodes.quarantined
    three_nodes.fail_bad_node(4)
    assert not three_nodes.quarantined


def test_a_supervisor_that_dies_repeatedly_is_a_bad_machine(three_nodes: ThreeNodeHarness) -> None:
    for attempt in range(3):
        three_nodes.post_world(f"w{attempt}", *three_nodes.nodes)
        three_nodes.post_step(attempt)
        three_nodes.post_failure(f"w{attempt}", "node0", 0, PEER)
        assert not three_nodes.quarantined
        three_nodes.coordinator.register_node("node2")
        three_nodes.coordinator.register_node("node2")  # a second restart within the same world counts once
    assert three_nodes.quarantined == {"node2"}


@pytest.mark.parametrize("error", ["ValueError: of the script", "RuntimeError: shapes do not match"])
def test_a_rank_that_meets_a_bug_makes_no_machine_bad(three_nodes: ThreeNodeHarness, error: str) -> None:
    for attempt in range(6):
        three_nodes.post_step(attempt)
        three_nodes.fail_bad_node(attempt, error, step=attempt)
    assert not three_nodes.quarantined
    assert not three_nodes.list_events(EVENT_NOTE)


def test_of_nodes_that_fail_equally_often_none_is_quarantined(three_nodes: ThreeNodeHarness) -> None:
    for attempt in range(8):
        three_nodes.post_step(attempt)
        three_nodes.post_world(f"w{attempt}", *three_nodes.nodes)
        three_nodes.post_failure(f"w{attempt}", three_nodes.nodes[attempt % 2], error="killed by SIGKILL", signal="SIGKILL")
    assert not three_nodes.quarantined


def test_no_node_is_quarantined_while_others_finish(three_nodes: ThreeNodeHarness) -> None:
    for attempt in range(2):
        three_nodes.fail_bad_node(attempt)
    three_nodes.post_world("w2", *three_nodes.nodes)
    three_nodes.coordinator.record_node_exit("node0", 0)
    three_nodes.post_failure("w2", "node2", 4, "killed by SIGKILL", signal="SIGKILL")
    assert three_nodes.outcome is not None
    assert not three_nodes.quarantined


def test_the_cause_is_named_even_when_its_consequence_is_reported_first() -> None:
    board = CoordinatorHarness(max_restarts=0)
    board.post_world("w", "node0", "node1")
    board.post_failure("w", "node0", 0, PEER)
    assert board.outcome is None
    board.coordinator.handle_event(
        Event(EVENT_FAILURE, {"world": "w", "node": "node1", "rank": 3, "signal": "SIGKILL", "error": "killed by SIGKILL"})
    )
    assert board.outcome is not None
    assert board.outcome.reason.startswith("node1 rank 3: killed by SIGKILL; failed once")
    assert board.outcome.exit_code == 137


def test_a_consequence_without_a_cause_is_an_outcome_after_a_while() -> None:
    board = CoordinatorHarness(max_restarts=0)
    board.coordinator.handle_event(Event(EVENT_NODE_JOINED, {"node": "node1", "address": "10.0.0.3"}))
    board.post_world("w", "node0", "node1")
    board.post_failure("w", "node0", 0, PEER)
    board.advance_time(COLLATERAL_GRACE_SECONDS - 0.1)
    assert board.outcome is None
    board.advance_time(0.2)
    assert board.outcome is not None
    assert board.outcome.reason == "node0 rank 0: lost its connection to node1; failed once without a new step, max_restarts is 0"
    assert board.list_events(EVENT_FAILURE)[0]["error"] == PEER


def test_an_outcome_names_the_node_that_went_silent_before_the_ranks_that_lost_it() -> None:
    board = CoordinatorHarness(max_restarts=0)
    for node in ("node0", "node1"):
        board.coordinator.register_node(node)
        board.coordinator.handle_event(Event(EVENT_NODE_JOINED, {"node": node, "address": f"10.0.0.{2 + int(node[-1])}"}))
    board.post_world("w", "node0", "node1")
    board.post_failure("w", "node0", 0, PEER)
    board.time += COLLATERAL_GRACE_SECONDS
    board.coordinator.record_heartbeat("node0")
    board.coordinator.process_timeouts()
    assert board.outcome is not None
    assert board.outcome.reason.startswith("node1: went silent without reporting a reason; node0 rank 0: lost its connection to node1; ")


def test_peers_that_stumble_over_a_coming_or_going_node_cost_nothing() -> None:
    board = CoordinatorHarness(max_restarts=0)
    board.coordinator.register_node("node0")
    board.post_world("w0", "node0", "node1")
    board.coordinator.register_node("node2")
    board.post_failure("w0", "node0", 0, PEER)
    board.post_world("w1", "node0", "node1", "node2")
    board.coordinator.record_node_exit("node2", EXIT_PLANNED)
    board.post_failure("w1", "node0", 0, PEER)
    board.advance_time(COLLATERAL_GRACE_SECONDS + 1)
    assert board.outcome is None
    board.post_world("w2", "node0", "node1")
    board.post_failure("w2", "node0", 0, PEER)
    board.advance_time(COLLATERAL_GRACE_SECONDS + 1)
    assert board.outcome is not None


def test_an_agent_that_fails_belongs_to_the_world_of_its_round(harness: CoordinatorHarness) -> None:
    harness.post_world("b-1/x:1", "node0", "node1")
    harness.coordinator.handle_event(
        Event(EVENT_FAILURE, {"round": "b-1", "node": "node1", "signal": "SIGKILL", "error": "this node's agent was killed"})
    )
    harness.post_failure("b-1/x:1", error=PEER)
    harness.post_world("b-2/x:1", "node0", "node1")
    harness.post_failure("b-2/x:1")
    assert harness.outcome is None


def test_a_permanent_failure_is_an_outcome_at_once(harness: CoordinatorHarness) -> None:
    harness.coordinator.handle_event(Event(EVENT_FAILURE, {"node": "node1", "error": "no torch", "exit_code": 1, "permanent": True}))
    assert harness.outcome == RunOutcome("failed", "node1: no torch; retrying would not help", 1, round="b-1")


def test_the_trainer_reports_when_it_is_done(harness: CoordinatorHarness) -> None:
    harness.post_world("w", "node0", "node1")
    harness.coordinator.handle_event(Event(EVENT_TRAINING_FINISHED, {"step": 40}))
    harness.post_failure("w", error="teardown")
    assert harness.outcome == RunOutcome("done", "the last step, 40, is done", 0, round="b-1")


def test_a_script_that_reports_nothing_is_done_when_its_world_has_exited(harness: CoordinatorHarness) -> None:
    harness.coordinator.register_node("spare")
    harness.post_world("w", "node0", "node1")
    harness.coordinator.record_node_exit("node0", 0)
    assert harness.outcome is None
    harness.coordinator.record_node_exit("node1", 0)
    assert harness.outcome == RunOutcome("done", "all 2 nodes have finished", 0, round="b-1")


def test_while_others_finish_no_new_round_is_started_for_a_spare(harness: CoordinatorHarness) -> None:
    harness.coordinator.register_node("spare")
    harness.post_world("b-1/x:1", "node0", "node1")
    harness.post_returned_ranks("b-1/x:1", "node0", 0, 1)
    assert harness.coordinator.close_round("spare", "b-1").round == "b-1"
    assert harness.outcome is None
    harness.post_returned_ranks("b-1/x:1", "node1", 2, 3)
    assert harness.coordinator.close_round("spare", "b-1").round == "b-1"
    assert harness.outcome is None


def test_a_world_whose_ranks_have_all_returned_is_done_although_an_agent_restarts_them(harness: CoordinatorHarness) -> None:
    """torch's agent does so if a node waits to join; no other node comes back to form a world with it."""
    harness.post_world("b-1/x:1", "node0", "node1")
    harness.post_returned_ranks("b-1/x:1", "node1", 2, 3)
    harness.post_returned_ranks("b-1/x:1", "node0", 1)
    assert not [data for data in harness.list_events(EVENT_SCRIPT_RETURNED) if data["node"] == "node0"]
    harness.post_returned_ranks("b-1/x:1", "node0", 0)
    assert [data["node"] for data in harness.list_events(EVENT_SCRIPT_RETURNED)] == ["node1", "node0"]
    harness.coordinator.record_node_exit("node0", 0)
    assert harness.outcome is None
    assert harness.coordinator.close_round("node1", "b-1").outcome == RunOutcome("done", "all 2 nodes have finished", 0, round="b-1")


def test_a_rank_that_has_returned_does_not_finish_its_node(harness: CoordinatorHarness) -> None:
    harness.post_world("b-1/x:1", "node0", "node1")
    harness.post_returned_ranks("b-1/x:1", "node0", 0)
    assert harness.coordinator.close_round("node1", "b-1").round == "b-2"
    assert harness.outcome is None


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (
            lambda harness: harness.post_failure("w", "node1", 2),
            "node1 rank 2: boom; node0 had already finished, so this world cannot form again",
        ),
        (
            lambda harness: harness.coordinator.close_round("node1", "b-1"),
            "node1 ended; node0 had already finished, so this world cannot form again",
        ),
        (
            lambda harness: harness.coordinator.register_node("node1"),
            "node1 was lost; node0 had already finished, so this world cannot form again",
        ),
        (
            lambda harness: harness.advance_time(NODE_LOST_SECONDS + 1),
            "node1 was lost; node0 had already finished, so this world cannot form again",
        ),
        (
            lambda harness: harness.coordinator.record_node_exit("node1", 1),
            "node1 exited with exit code 1; node0 had already finished, so this world cannot form again",
        ),
    ],
)
def test_after_one_node_finished_the_others_must(harness: CoordinatorHarness, action: Any, why: str) -> None:
    harness.post_world("w", "node0", "node1")
    harness.coordinator.record_node_exit("node0", 0)
    action(harness)
    assert harness.outcome == RunOutcome("failed", why, 1, round="b-1")


def test_a_rank_may_fail_next_to_a_finished_rank_of_its_own_node(harness: CoordinatorHarness) -> None:
    harness.post_world("w", "node0", "node1")
    harness.post_returned_ranks("w", "node0", 0)
    harness.post_failure("w", "node0", 1)
    assert harness.outcome is None


def test_the_coordinator_ends_once_every_node_knows_that_the_run_is_over() -> None:
    """A node repeats its exit until notifications are delivered too: a coordinator that is lost before that needs the outcome."""
    pending = ["notification"]
    harness = CoordinatorHarness(has_notified=lambda: not pending)
    coordinator = harness.coordinator
    for node in ("node0", "node1", "node2"):
        coordinator.register_node(node)
    coordinator.record_node_exit("node2", 0)
    coordinator.handle_event(Event(EVENT_TRAINING_FINISHED, {"step": 1}))
    assert not coordinator.record_node_exit("node0", 0).is_over
    harness.advance_time(LINGER_SECONDS)
    assert not coordinator.record_node_exit("node0", 0).is_over
    pending.clear()
    assert coordinator.record_node_exit("node0", 0).is_over
    assert not coordinator.is_finished
    assert coordinator.record_node_exit("node1", 0).is_over
    assert coordinator.is_finished
    assert [data["node"] for data in harness.list_events(EVENT_NODE_LEFT)] == ["node2", "node0", "node1"]


def test_a_node_that_is_lost_while_it_waits_ends_the_wait_of_the_coordinator(harness: CoordinatorHarness) -> None:
    harness.coordinator.handle_event(Event(EVENT_TRAINING_FINISHED, {"step": 1}))
    for node in ("node0", "node1"):
        assert not harness.coordinator.record_node_exit(node, 0).is_over
    harness.advance_time(NODE_LOST_SECONDS)
    assert harness.coordinator.record_node_exit("node0", 0).is_over
    assert not harness.coordinator.is_finished, "node1 may still repeat its exit"
    harness.advance_time(1)
    assert harness.coordinator.is_finished


def test_an_outcome_is_final_although_its_coordinator_is_lost(harness: CoordinatorHarness) -> None:
    """The next one adopts it from a node, publishes it for those who follow its log, and ends when the nodes have ended."""
    harness.post_failure("b-1/x:0", permanent=True)
    outcome = harness.outcome
    assert outcome is not None
    successor = CoordinatorHarness(boot_id="c")
    successor.coordinator.adopt_outcome(outcome)
    assert successor.coordinator.close_round("node0", "b-1").outcome == outcome
    successor.coordinator.adopt_outcome(RunOutcome("done", "another", 0))
    assert successor.list_events(EVENT_OUTCOME) == harness.list_events(EVENT_OUTCOME)
    successor.advance_time(LINGER_SECONDS)
    assert not successor.coordinator.is_finished
    successor.coordinator.record_node_exit("node0", 0)
    assert successor.coordinator.is_finished


def test_the_coordinator_does_not_wait_for_a_silent_node(harness: CoordinatorHarness) -> None:
    harness.coordinator.handle_event(Event(EVENT_TRAINING_FINISHED, {"step": 1}))
    harness.advance_time(NODE_LOST_SECONDS - 1)
    assert not harness.coordinator.is_finished
    harness.advance_time(2)
    assert harness.coordinator.is_finished
    assert [(data["node"], data["exit_code"]) for data in harness.list_events(EVENT_NODE_LEFT)] == [("node0", None), ("node1", None)]


def test_only_the_coordinator_writes_an_outcome(harness: CoordinatorHarness) -> None:
    with pytest.raises(ValueError, match="outcome"):
        harness.coordinator.handle_event(Event(EVENT_OUTCOME, {"status": "done", "reason": "I say so", "exit_code": 0}))
    assert harness.outcome is None


def test_what_is_permanent_before_the_first_step_is_transient_afterwards(harness: CoordinatorHarness) -> None:
    harness.post_world("w1", "node0", "node1")
    harness.post_step(1)
    harness.post_failure("w1", error="no such file", permanent=PERMANENT_BEFORE_FIRST_STEP)
    assert harness.outcome is None
    harness.post_failure("w2", error="no such module", permanent=True, hint="install it")
    assert harness.outcome
    assert harness.outcome.reason == "node0 rank 0: no such module; retrying would not help"
    assert harness.list_events(EVENT_OUTCOME)[0]["hint"] == "install it"


def test_what_is_permanent_before_the_first_step_ends_a_run_without_steps(harness: CoordinatorHarness) -> None:
    harness.post_failure("w1", error="no such file", permanent=PERMANENT_BEFORE_FIRST_STEP)
    assert harness.outcome
    assert "hint" not in harness.list_events(EVENT_OUTCOME)[0]


def test_a_rank_is_answered_whether_its_reason_is_known(harness: CoordinatorHarness) -> None:
    def post(world: str, rank: int, error: str) -> EventResponse:
        return harness.coordinator.handle_event(
            Event(EVENT_FAILURE, {"world": world, "node": "node0", "rank": rank, "error": error, "exit_code": 1})
        )

    harness.post_world("w1", "node0", "node1")
    assert post("w1", 0, PEER) == EventResponse(is_known=False, run_failed=False), "nobody has said why yet"
    assert post("w1", 1, "boom") == EventResponse(is_known=False, run_failed=False)
    assert post("w1", 2, "boom") == EventResponse(is_known=True, run_failed=False)
    assert post("w1", 3, PEER + "9") == EventResponse(is_known=True, run_failed=False), "a consequence"
    assert post("w1", 4, "step 7 on rank 4: 1.5 GiB more were requested") == EventResponse(is_known=False, run_failed=False)
    assert post("w1", 5, "step 7 on rank 5: 2 GiB more were requested") == EventResponse(is_known=True, run_failed=False), (
        "the same, but for its numbers"
    )
    assert post("w2", 0, "boom") == EventResponse(is_known=False, run_failed=False), "another world"


def test_of_a_run_that_has_failed_no_more_failures_are_published(harness: CoordinatorHarness) -> None:
    harness.post_failure("w1", permanent=True)
    harness.post_failure("w1", rank=1)
    assert len(harness.list_events(EVENT_FAILURE)) == 1
    assert harness.coordinator.handle_event(Event(EVENT_FAILURE, {"world": "w1", "node": "node1", "rank": 2, "error": "late"})).run_failed


def test_progress_is_printed_at_once_then_more_and_more_seldom_and_never_after_what_followed_it(harness: CoordinatorHarness) -> None:
    for step in range(3):
        harness.post_step(step)
    assert [data["step"] for data in harness.list_events(EVENT_PROGRESS)] == [0]
    harness.advance_time(0.5)
    assert [data["step"] for data in harness.list_events(EVENT_PROGRESS)] == [0, 2]
    harness.post_step(3)
    harness.coordinator.handle_event(Event(EVENT_CHECKPOINT, {"step": 3}))
    assert [event.kind for event in harness.events[-2:]] == [EVENT_PROGRESS, EVENT_CHECKPOINT]
    harness.advance_time(10_000)
    before = len(harness.list_events(EVENT_PROGRESS))
    for step in range(1000):
        harness.post_step(step)
        harness.advance_time(0.5)
    assert len(harness.list_events(EVENT_PROGRESS)) - before == pytest.approx(500 / 30, abs=1)


def test_what_nodes_use_is_one_line_and_takes_less_than_half_of_the_log_in_a_month(harness: CoordinatorHarness) -> None:
    def use(node: str, memory: int) -> None:
        harness.coordinator.handle_event(
            Event(EVENT_USAGE, {"node": node, "cpu": 1.5, "cpus": 2.0, "memory": memory, "memory_limit": 2**40})
        )

    use("node0", 1)
    use("node1", 2)
    harness.advance_time(30)
    use("node0", 3)
    assert [{name: used["memory"] for name, used in data["nodes"].items()} for data in harness.list_events(EVENT_USAGE)] == [
        {"node0": 1},
        {"node0": 3, "node1": 2},
    ]
    harness.coordinator.record_node_exit("node1", EXIT_PLANNED)
    for number in range(100):
        harness.coordinator.register_node(f"node{number + 2}")
    before = len(harness.events)
    for _ in range(1000):
        for number in range(100):
            harness.coordinator.record_heartbeat(f"node{number + 2}")
            use(f"node{number + 2}", 2**36)
        harness.time += 10
    lines = [event.to_line() for event in harness.events[before:] if event.kind == EVENT_USAGE]
    assert '"node1":' not in lines[-1]
    # The engine adds a timestamp to each line, and escapes each quote.
    assert sum(len(line) + line.count('"') + 80 for line in lines) * 30 * 24 * 3600 / 10_000 < 50e6
