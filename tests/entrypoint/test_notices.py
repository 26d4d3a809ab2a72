"""The notice board's rules, without sockets: calls in, events out, a clock that is turned by hand."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.entrypoint.notices import COLLATERAL_GRACE, LINGER, STEADY, Notices
from swarmtrain.entrypoint.presence import SILENT
from swarmtrain.wire import (
    AT_FIRST,
    CHECKPOINT,
    EXIT_PLANNED,
    FAILURE,
    FINISHED,
    LEFT,
    LEFT_OUT,
    LET_IN,
    NOTE,
    PROGRESS,
    RETURNED,
    USAGE,
    VERDICT,
    WORLD,
    Event,
    Receipt,
    Verdict,
)

PEER = "RuntimeError: Connection closed by peer [10.0.0.3]:4711"


class Board:
    """Notices with its output kept, and a clock."""

    def __init__(self, max_restarts: int = 2, per_hour: int = 99, min_nodes: int = 9) -> None:
        self.time = 100.0
        self.printed: list[Event] = []
        budget = {"max_restarts": max_restarts, "max_restarts_per_hour": per_hour, "min_nodes": min_nodes}
        self.notices = Notices(run="r", **budget, boot="b", now=lambda: self.time, publish=self.printed.append)

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in self.printed if event.kind == kind]

    @property
    def verdict(self) -> Verdict | None:
        return self.notices.orders.verdict

    def world(self, key: str, *nodes: str) -> None:
        for index, node in enumerate(nodes):
            facts = {"world": key, "world_size": 2 * len(nodes), "nodes": len(nodes), "ranks": {node: [2 * index, 2 * index + 1]}}
            self.notices.post(Event(WORLD, facts))

    def fail(self, world: str, node: str = "node0", rank: int = 0, error: str = "boom", **more: Any) -> None:
        self.notices.post(Event(FAILURE, {"world": world, "node": node, "rank": rank, "error": error, "exit_code": 1, **more}))

    def step(self, step: int) -> None:
        self.notices.post(Event(PROGRESS, {"step": step}))

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.notices.tick()


@pytest.fixture
def board() -> Board:
    made = Board()
    for node in ("node0", "node1"):
        made.notices.join(node)
    return made


def test_nodes_that_close_the_same_round_draw_one_new_one(board: Board) -> None:
    assert board.notices.orders.round == "b-1"
    assert board.notices.close("node0", "b-1").round == "b-2"
    assert board.notices.close("node1", "b-1").round == "b-2"
    assert board.notices.close("node1", "a-7").round == "b-2"
    assert board.notices.beat("node0").round == "b-2"


def test_a_world_is_told_once_all_its_nodes_are_in_it(board: Board) -> None:
    board.notices.post(Event(WORLD, {"world": "b-1/x:1", "world_size": 4, "nodes": 2, "ranks": {"node1": [0, 1]}}))
    assert not board.kinds(WORLD)
    board.world("b-1/x:2", "node1", "node0")
    assert [data["ranks"] for data in board.kinds(WORLD)] == [{"node1": [0, 1], "node0": [2, 3]}]
    assert board.kinds(WORLD)[0]["world_size"] == 4


def test_all_ranks_of_a_world_cost_one_restart(board: Board) -> None:
    for attempt in range(3):
        assert board.verdict is None
        board.world(f"b-1/x:{attempt}", "node0", "node1")
        for rank in range(4):
            board.fail(f"b-1/x:{attempt}", rank=rank, error=f"boom {attempt}.{rank}")
    assert board.verdict == Verdict("failed", "node0 rank 0: boom 2.0; failed 3 times in a row without a new step, max_restarts is 2", 1)
    assert len(board.kinds(VERDICT)) == 1


def test_what_one_rank_says_twice_is_told_once(board: Board) -> None:
    board.world("w", "node0", "node1")
    board.fail("w", error="as the rank saw it")
    board.fail("w", error="as its agent saw it")
    assert [data["error"] for data in board.kinds(FAILURE)] == ["as the rank saw it"]


def test_what_befell_one_rank_is_told_of_that_rank_whoever_tells_it(board: Board) -> None:
    board.world("b-1/1", "node0", "node1")
    board.fail("b-1/1", "node1", 3, "cannot be written", befell=1, local_rank=1)
    board.fail("b-1/1", "node0", 1, "cannot be written", befell=1, local_rank=1)
    board.fail("b-1/1", "node1", 3, "exit code 1")
    (told,) = board.kinds(FAILURE)
    assert (told["node"], told["rank"], told["local_rank"]) == ("node0", 1, 1)
    assert "befell" not in told


def test_a_new_step_gives_the_restarts_back_an_old_one_does_not(board: Board) -> None:
    board.step(10)
    for attempt in range(2):
        board.fail(f"w{attempt}")
    board.step(11)
    for attempt in range(2, 4):
        board.fail(f"w{attempt}")
    assert board.verdict is None
    board.step(11)
    board.fail("w4")
    assert board.verdict is not None


def test_a_world_that_lived_long_counts_as_progress_where_no_steps_are_told(board: Board) -> None:
    for attempt in range(6):
        board.world(f"w{attempt}", "node0", "node1")
        board.pass_time(STEADY)
        board.notices.beat("node0")
        board.notices.beat("node1")
        board.fail(f"w{attempt}")
    assert board.verdict is None


def test_a_run_that_comes_further_each_time_may_still_not_fail_too_often_within_an_hour() -> None:
    board = Board(max_restarts=2, per_hour=5)
    for attempt in range(100):  # a machine a quarter of an hour, for a day
        board.step(attempt)
        board.fail(f"w{attempt}", f"node{attempt % 9}", error="killed by SIGKILL", signal="SIGKILL")
        board.time += 900
    board.time += 3600
    for attempt in range(100, 106):
        board.step(attempt)
        assert board.verdict is None
        board.fail(f"w{attempt}")
    assert board.verdict is not None
    assert board.verdict.why.endswith("boom; failed 6 times within an hour, max_restarts_per_hour is 5")


def test_the_same_exception_at_the_same_step_twice_in_a_row_is_a_bug() -> None:
    board = Board(max_restarts=50)
    board.step(7)
    board.fail("w1", "node0", 0, PEER, step=8)
    board.fail("w1", "node1", 2, "ValueError: no room for 0x7f3a, of 17", step=8)
    board.fail("w2", "node1", 2, "ValueError: no room for 0x7f3a, of 17", step=9)
    assert board.verdict is None, "at another step"
    board.fail("w3", "node0", 0, PEER, step=9)
    assert board.verdict is None
    board.fail("w3", "node0", 1, "ValueError: no room for 0x81aa, of 18", step=9)
    assert board.verdict is not None
    assert board.verdict.why.endswith("0x81aa, of 18; the same at the same step as the time before: no fault of a machine")


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
def test_what_may_be_a_machines_fault_is_no_bug_however_often(facts: dict[str, Any]) -> None:
    board = Board(max_restarts=50)
    for attempt in range(10):
        board.world(f"w{attempt}", "node0", "node1")
        board.fail(f"w{attempt}", **facts)
    board.pass_time(COLLATERAL_GRACE + 1)
    assert board.verdict is None


def test_two_bugs_between_which_a_machine_died_are_not_in_a_row() -> None:
    board = Board(max_restarts=50)
    for attempt in range(3):
        board.fail(f"a{attempt}", error="boom", step=3)
        board.fail(f"b{attempt}", error="killed by SIGKILL", signal="SIGKILL")
    assert board.verdict is None


def test_a_node_that_fails_again_and_again_is_named_once_an_hour_where_it_cannot_be_done_without() -> None:
    board = Board(max_restarts=50)
    for attempt, node in enumerate(["node1", "node0", "node1", "node2", "node1", "node1", "node1", "node1"]):
        board.fail(f"w{attempt}", node, error="killed by SIGKILL", signal="SIGKILL")
        board.fail(f"w{attempt}", "node0", 9, PEER)
    (note,) = board.kinds(NOTE)
    assert note["node"] == "node1"
    assert note["message"].startswith("node1 was the first to fail 5 times within an hour, more than twice as often as all others together")
    board.time += 3600
    for attempt in range(3):
        board.fail(f"later{attempt}", f"node{attempt + 1}", error="killed by SIGKILL", signal="SIGKILL")
    assert len(board.kinds(NOTE)) == 1


class Three(Board):
    """Three nodes that beat, of which two may train."""

    def __init__(self) -> None:
        super().__init__(max_restarts=2, min_nodes=2)
        self.nodes = ["node0", "node1", "node2"]
        for node in self.nodes:
            self.notices.join(node)
        self.pass_time(3)  # the board has heard of all

    def break_down(self, attempt: int, error: str = "OSError: [Errno 5] Input/output error", **facts: Any) -> None:
        """A rank of node2 fails, and its peers of that; then the next world forms."""
        self.world(f"w{attempt}", *self.nodes)
        self.fail(f"w{attempt}", "node0", 0, PEER)
        self.fail(f"w{attempt}", "node2", 4, error, **facts)
        self.fail(f"w{attempt}", "node2", 5, error, **facts)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds / 10)):
            for node in self.nodes:
                self.notices.beat(node)
            self.pass_time(10)

    @property
    def out(self) -> set[str]:
        """Those that may not begin, though all have come."""
        for node in self.nodes:
            self.notices.close(node, "")
        return {node for node in self.nodes if self.notices.close(node, "").wait}


@pytest.fixture
def three() -> Three:
    return Three()


def test_a_node_whose_machine_fails_again_and_again_sits_out_for_an_hour(three: Three) -> None:
    for attempt in range(3):
        assert not three.out
        three.break_down(attempt)
    assert three.kinds(LEFT_OUT) == [
        {
            "node": "node2",
            "seconds": 3600.0,
            "why": "the first to fail 3 times within an hour, more than twice as often as all others together",
        }
    ]
    assert three.out == {"node2"}
    assert three.notices.beat("node0").round == "b-2", "the others meet in a round in which it is not"
    assert three.notices.close("node2", "b-1").wait
    assert three.notices.close("node2", "b-1").round == "b-2", "its agent's end draws no other"
    three.notices.join("node2")
    assert three.out == {"node2"}, "its container, too, was started again"
    three.fail("w2", "node1", 3, PEER + " once more")
    assert three.verdict is None, "max_restarts is 2, and what failed three times is away"
    for attempt in range(3, 5):
        three.world(f"w{attempt}", "node0", "node1")
        three.fail(f"w{attempt}", "node0", error=f"boom {attempt}")
        assert three.verdict is None
    three.step(1)
    three.wait(3590)
    assert three.out == {"node2"}
    three.wait(10)
    assert not three.out
    assert three.kinds(LET_IN) == [{"node": "node2", "why": "its hour is over"}]
    three.world("w5", *three.nodes)
    three.fail("w5", "node2", 4, "killed by SIGBUS", signal="SIGBUS")
    assert not three.out, "what is an hour ago is forgiven"


def test_a_bad_machine_is_better_than_none(three: Three) -> None:
    for attempt in range(3):
        three.break_down(attempt)
    three.nodes.remove("node1")
    three.wait(SILENT + 10)
    assert not three.out
    assert three.kinds(LET_IN) == [{"node": "node2", "why": "the others are fewer than min_nodes, 2"}]
    three.step(1)
    three.world("w3", "node0", "node2")
    three.fail("w3", "node2", 3, "killed by SIGKILL", signal="SIGKILL")
    assert not three.out
    assert "min_nodes" in three.kinds(NOTE)[0]["message"]
    three.nodes.append("node1")
    three.notices.join("node1")
    three.break_down(4)
    assert three.out == {"node2"}, "at once, now that it is needed no more"


def test_who_was_told_to_leave_comes_back_with_nothing_against_it(three: Three) -> None:
    for attempt in range(3):
        three.break_down(attempt)
    three.notices.leave("node2", EXIT_PLANNED)
    three.notices.join("node2")
    assert not three.out
    three.break_down(4)
    assert not three.out


def test_a_supervisor_that_dies_again_and_again_is_a_bad_machine(three: Three) -> None:
    for attempt in range(3):
        three.world(f"w{attempt}", *three.nodes)
        three.step(attempt)
        three.fail(f"w{attempt}", "node0", 0, PEER)
        assert not three.out
        three.notices.join("node2")
        three.notices.join("node2")  # whatever dies meanwhile, it is the same world's
    assert three.out == {"node2"}


@pytest.mark.parametrize("error", ["ValueError: of the script", "RuntimeError: shapes do not match"])
def test_a_rank_that_meets_a_bug_makes_no_machine_bad(three: Three, error: str) -> None:
    for attempt in range(6):
        three.step(attempt)
        three.break_down(attempt, error, step=attempt)
    assert not three.out
    assert not three.kinds(NOTE)


def test_of_nodes_that_fail_alike_none_is_left_out(three: Three) -> None:
    for attempt in range(8):
        three.step(attempt)
        three.world(f"w{attempt}", *three.nodes)
        three.fail(f"w{attempt}", three.nodes[attempt % 2], error="killed by SIGKILL", signal="SIGKILL")
    assert not three.out


def test_nobody_is_left_out_while_others_finish(three: Three) -> None:
    for attempt in range(2):
        three.break_down(attempt)
    three.world("w2", *three.nodes)
    three.notices.leave("node0", 0)
    three.fail("w2", "node2", 4, "killed by SIGKILL", signal="SIGKILL")
    assert three.verdict is not None
    assert not three.out


def test_the_cause_is_named_even_when_its_wake_is_heard_first() -> None:
    board = Board(max_restarts=0)
    board.world("w", "node0", "node1")
    board.fail("w", "node0", 0, PEER)
    assert board.verdict is None
    board.notices.post(Event(FAILURE, {"world": "w", "node": "node1", "rank": 3, "signal": "SIGKILL", "error": "killed by SIGKILL"}))
    assert board.verdict is not None
    assert board.verdict.why.startswith("node1 rank 3: killed by SIGKILL; failed once")
    assert board.verdict.exit_code == 137


def test_a_wake_without_a_cause_is_a_verdict_after_a_while() -> None:
    board = Board(max_restarts=0)
    board.world("w", "node0", "node1")
    board.fail("w", "node0", 0, PEER)
    board.pass_time(COLLATERAL_GRACE - 0.1)
    assert board.verdict is None
    board.pass_time(0.2)
    assert board.verdict is not None
    assert PEER in board.verdict.why


def test_peers_that_stumble_over_a_coming_or_going_node_cost_nothing() -> None:
    board = Board(max_restarts=0)
    board.notices.join("node0")
    board.world("w0", "node0", "node1")
    board.notices.join("node2")
    board.fail("w0", "node0", 0, PEER)
    board.world("w1", "node0", "node1", "node2")
    board.notices.leave("node2", EXIT_PLANNED)
    board.fail("w1", "node0", 0, PEER)
    board.pass_time(COLLATERAL_GRACE + 1)
    assert board.verdict is None
    board.world("w2", "node0", "node1")
    board.fail("w2", "node0", 0, PEER)
    board.pass_time(COLLATERAL_GRACE + 1)
    assert board.verdict is not None


def test_an_agent_that_fails_belongs_to_the_world_of_its_round(board: Board) -> None:
    board.world("b-1/x:1", "node0", "node1")
    board.notices.post(Event(FAILURE, {"round": "b-1", "node": "node1", "signal": "SIGKILL", "error": "this node's agent was killed"}))
    board.fail("b-1/x:1", error=PEER)
    board.world("b-2/x:1", "node0", "node1")
    board.fail("b-2/x:1")
    assert board.verdict is None


def test_a_permanent_failure_is_a_verdict_at_once(board: Board) -> None:
    board.notices.post(Event(FAILURE, {"node": "node1", "error": "no torch", "exit_code": 1, "permanent": True}))
    assert board.verdict == Verdict("failed", "node1: no torch; this does not get better by trying again", 1)


def test_the_trainer_says_when_it_is_done(board: Board) -> None:
    board.world("w", "node0", "node1")
    board.notices.post(Event(FINISHED, {"step": 40}))
    board.fail("w", error="teardown")
    assert board.verdict == Verdict("done", "the last step, 40, is done", 0)


def test_a_script_that_says_nothing_is_done_when_its_world_has_left(board: Board) -> None:
    board.notices.join("spare")
    board.world("w", "node0", "node1")
    board.notices.leave("node0", 0)
    assert board.verdict is None
    board.notices.leave("node1", 0)
    assert board.verdict == Verdict("done", "all 2 nodes have finished", 0)


def test_while_others_finish_no_new_round_is_drawn_for_a_spare(board: Board) -> None:
    board.notices.join("spare")
    board.world("b-1/x:1", "node0", "node1")
    board.notices.post(Event(RETURNED, {"node": "node0", "world": "b-1/x:1"}))
    assert board.notices.close("spare", "b-1").round == "b-1"
    assert board.verdict is None


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda board: board.fail("w", "node1", 2), "node1 rank 2: boom; node0 had finished by then, so this world cannot form again"),
        (lambda board: board.notices.close("node1", "b-1"), "node1 ended; node0 had finished by then, so this world cannot form again"),
        (lambda board: board.notices.join("node1"), "node1 was lost; node0 had finished by then, so this world cannot form again"),
        (lambda board: board.pass_time(SILENT + 1), "node1 was lost; node0 had finished by then, so this world cannot form again"),
        (
            lambda board: board.notices.leave("node1", 1),
            "node1 left with exit code 1; node0 had finished by then, so this world cannot form again",
        ),
    ],
)
def test_after_one_node_finished_the_others_must(board: Board, what: Any, why: str) -> None:
    board.world("w", "node0", "node1")
    board.notices.leave("node0", 0)
    what(board)
    assert board.verdict == Verdict("failed", why, 1)


def test_a_rank_may_fail_beside_a_finished_rank_of_its_own_node(board: Board) -> None:
    board.world("w", "node0", "node1")
    board.notices.post(Event(RETURNED, {"node": "node0", "world": "w"}))
    board.fail("w", "node0", 1)
    assert board.verdict is None


def test_the_board_stays_until_everybody_has_heard_the_verdict(board: Board) -> None:
    board.notices.post(Event(FINISHED, {"step": 1}))
    board.notices.leave("node0", 0)
    board.pass_time(LINGER + 1)
    assert not board.notices.ended
    board.notices.leave("node1", 0)
    assert board.notices.ended


def test_the_board_does_not_wait_for_a_silent_node(board: Board) -> None:
    board.notices.post(Event(FINISHED, {"step": 1}))
    board.pass_time(SILENT - 1)
    assert not board.notices.ended
    board.pass_time(2)
    assert board.notices.ended
    assert [(data["node"], data["exit_code"]) for data in board.kinds(LEFT)] == [("node0", None), ("node1", None)]


def test_a_verdict_is_the_boards_own_to_write(board: Board) -> None:
    with pytest.raises(ValueError, match="verdict"):
        board.notices.post(Event(VERDICT, {"status": "done", "why": "I say so", "exit_code": 0}))
    assert board.verdict is None


def test_what_is_permanent_until_a_step_is_made_may_pass_afterwards(board: Board) -> None:
    board.world("w1", "node0", "node1")
    board.step(1)
    board.fail("w1", error="no such file", permanent=AT_FIRST)
    assert board.verdict is None
    board.fail("w2", error="no such module", permanent=True, hint="install it")
    assert board.verdict
    assert board.verdict.why == "node0 rank 0: no such module; this does not get better by trying again"
    assert board.kinds(VERDICT)[0]["hint"] == "install it"


def test_what_is_permanent_until_a_step_is_made_ends_a_run_that_has_made_none(board: Board) -> None:
    board.fail("w1", error="no such file", permanent=AT_FIRST)
    assert board.verdict
    assert "hint" not in board.kinds(VERDICT)[0]


def test_a_rank_is_told_whether_its_reason_is_known(board: Board) -> None:
    def post(world: str, rank: int, error: str) -> Receipt:
        return board.notices.post(Event(FAILURE, {"world": world, "node": "node0", "rank": rank, "error": error, "exit_code": 1}))

    board.world("w1", "node0", "node1")
    assert post("w1", 0, PEER) == Receipt(known=False, over=False), "nobody has said why yet"
    assert post("w1", 1, "boom") == Receipt(known=False, over=False)
    assert post("w1", 2, "boom") == Receipt(known=True, over=False)
    assert post("w1", 3, PEER + "9") == Receipt(known=True, over=False), "a consequence"
    assert post("w1", 4, "step 7 on rank 4: 1.5 GiB more were wanted") == Receipt(known=False, over=False)
    assert post("w1", 5, "step 7 on rank 5: 2 GiB more were wanted") == Receipt(known=True, over=False), "the same, but for its numbers"
    assert post("w2", 0, "boom") == Receipt(known=False, over=False), "another world"


def test_of_a_run_that_has_failed_no_more_failures_are_told(board: Board) -> None:
    board.fail("w1", permanent=True)
    board.fail("w1", rank=1)
    assert len(board.kinds(FAILURE)) == 1
    assert board.notices.post(Event(FAILURE, {"world": "w1", "node": "node1", "rank": 2, "error": "late"})).over


def test_progress_is_printed_at_once_then_more_and_more_seldom_and_never_after_what_followed_it(board: Board) -> None:
    for step in range(3):
        board.step(step)
    assert [data["step"] for data in board.kinds(PROGRESS)] == [0]
    board.pass_time(0.5)
    assert [data["step"] for data in board.kinds(PROGRESS)] == [0, 2]
    board.step(3)
    board.notices.post(Event(CHECKPOINT, {"step": 3}))
    assert [event.kind for event in board.printed[-2:]] == [PROGRESS, CHECKPOINT]
    board.pass_time(10_000)
    before = len(board.kinds(PROGRESS))
    for step in range(1000):
        board.step(step)
        board.pass_time(0.5)
    assert len(board.kinds(PROGRESS)) - before == pytest.approx(500 / 30, abs=1)


def test_what_nodes_use_is_one_line_and_takes_less_than_half_of_the_log_in_a_month(board: Board) -> None:
    def use(node: str, memory: int) -> None:
        board.notices.post(Event(USAGE, {"node": node, "cpu": 1.5, "cpus": 2.0, "memory": memory, "memory_limit": 2**40}))

    use("node0", 1)
    use("node1", 2)
    board.pass_time(30)
    use("node0", 3)
    assert [{name: used["memory"] for name, used in data["nodes"].items()} for data in board.kinds(USAGE)] == [
        {"node0": 1},
        {"node0": 3, "node1": 2},
    ]
    board.notices.leave("node1", EXIT_PLANNED)
    for number in range(100):
        board.notices.join(f"node{number + 2}")
    before = len(board.printed)
    for _ in range(1000):
        for number in range(100):
            board.notices.beat(f"node{number + 2}")
            use(f"node{number + 2}", 2**36)
        board.time += 10
    lines = [event.to_line() for event in board.printed[before:] if event.kind == USAGE]
    assert '"node1":' not in lines[-1]
    # The engine writes each line with as many escapes as it has quotes, and a time.
    assert sum(len(line) + line.count('"') + 80 for line in lines) * 30 * 24 * 3600 / 10_000 < 50e6
