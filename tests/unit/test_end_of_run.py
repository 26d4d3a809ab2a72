"""When a command that follows a run without an outcome ends; the contract has the same with real processes."""

from __future__ import annotations

from typing import Any

from swarmtrain.errors import HostError
from swarmtrain.launchers.common.end_of_run import StopDetector
from swarmtrain.launchers.ssh.update_stream import _LiveNodes
from swarmtrain.protocol import RENDEZVOUS_SERVICE


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(*alive: str) -> dict[str, Any]:
    return {"alive": list(alive), "has_more": False}


def test_a_restart_of_all_nodes_does_not_end_a_follower() -> None:
    clock = Clock()
    detector = StopDetector(clock)
    for now, is_running, has_stopped in ((0, True, False), (1, False, False), (10, False, False), (10.5, True, False), (11, False, False)):
        clock.now = now
        assert detector.update(is_running=is_running) == has_stopped
    clock.now = 21.5
    assert detector.update(is_running=False)


def test_a_coordinator_alone_is_not_a_run_that_goes_on() -> None:
    clock = Clock()
    nodes = _LiveNodes(["a", "b"], clock)
    for now in range(20):
        clock.now = now
        has_stopped = nodes.update(("a", answer(RENDEZVOUS_SERVICE))) | nodes.update(("b", answer()))
    assert has_stopped


def test_hosts_that_do_not_answer_are_waited_for_while_none_does() -> None:
    clock = Clock()
    nodes = _LiveNodes(["a", "b"], clock)
    error = HostError("does not answer")
    assert not nodes.update(("a", answer("node0", RENDEZVOUS_SERVICE)))
    for now in range(300):
        clock.now = now
        assert not nodes.update(("a", error))
        assert not nodes.update(("b", error))


def test_a_host_that_stays_off_does_not_keep_the_follower_of_a_stopped_run() -> None:
    clock = Clock()
    nodes = _LiveNodes(["a", "b"], clock)
    ended = []
    for now in range(100):
        clock.now = now
        nodes.update(("b", HostError("does not answer")))
        ended += [now] if nodes.update(("a", answer(RENDEZVOUS_SERVICE))) else []
    assert ended[0] == 71  # 60 s without an answer, then 10 s
