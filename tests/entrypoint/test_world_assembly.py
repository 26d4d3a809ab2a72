"""Which nodes form a world, and when it is over, depending on which agents request one when."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarmtrain.entrypoint.coordinator.world_assembly import (
    ASSEMBLY_TIMEOUT_SECONDS,
    COORDINATOR_WARMUP_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    WorldAssembly,
)
from swarmtrain.protocol import WorldAssignment, WorldRequest


class SimulatedNodes:
    """Nodes that request worlds of an assembly, with a simulated clock. `responsive`: nodes whose supervisors send heartbeats."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.assembly = WorldAssembly(lambda: self.time)
        self.responsive: set[str] = set()
        self.excluded: set[str] = set()
        self.can_interrupt = True
        self.worlds: dict[str, str] = {}
        self.agents: dict[str, str] = {}
        self.time += COORDINATOR_WARMUP_SECONDS + 0.1

    def build_request(self, node: str, **changes: object) -> WorldRequest:
        agent = self.agents.setdefault(node, f"agent of {node}")
        request = WorldRequest(node, agent, "b-1", self.worlds.get(node, ""), 2, f"address of {node}", 4000, min_nodes=1, max_nodes=9)
        return replace(request, **changes)

    def update(self) -> None:
        self.assembly.update(self.responsive, self.excluded, can_interrupt=self.can_interrupt)

    def request(self, node: str, **changes: object) -> WorldAssignment:
        """Request a world for a node that sends heartbeats, and return the response."""
        self.responsive.add(node)
        request = self.build_request(node, **changes)
        self.assembly.add_request(request)
        self.update()
        return self.receive(node, request)

    def receive(self, node: str, request: WorldRequest | None = None) -> WorldAssignment:
        """Return the response that the agent of a node gets now."""
        assignment = self.assembly.get_assignment(request or self.build_request(node))
        if assignment.world:
            self.worlds[node] = assignment.world
        return assignment

    def form_world(self, *nodes: str, **changes: object) -> dict[str, WorldAssignment]:
        """Form a world of `nodes`, and return the assignment of each."""
        self.responsive |= set(nodes)
        requests = {node: self.build_request(node, **changes) for node in nodes}
        for request in requests.values():
            self.assembly.add_request(request)
            self.update()
        assignments = {node: self.receive(node, request) for node, request in requests.items()}
        assert all(assignment.world for assignment in assignments.values())
        return assignments

    def is_over(self, node: str) -> bool:
        self.update()
        return self.assembly.is_over(self.worlds[node])


@pytest.fixture
def nodes() -> SimulatedNodes:
    return SimulatedNodes()


def test_nodes_are_ranked_by_their_numbers_whoever_comes_first(nodes: SimulatedNodes) -> None:
    names = [f"node{number}" for number in range(12)]
    shuffled = random.sample(names, len(names))
    assignments = nodes.form_world(*shuffled, max_nodes=12)
    assert [assignments[name].group_rank for name in names] == list(range(12))
    assert {(each.world, each.node_count, each.address, each.port) for each in assignments.values()} == {
        ("b-1/1", 12, "address of node0", 4000)
    }
    assert all(each.has_equal_slots for each in assignments.values())


def test_nodes_with_different_numbers_of_ranks_are_told_so(nodes: SimulatedNodes) -> None:
    nodes.responsive = {"node0", "node1"}
    nodes.request("node0", slots=4)
    assert not nodes.request("node1").has_equal_slots


def test_a_node_that_has_announced_itself_is_waited_for(nodes: SimulatedNodes) -> None:
    for name in ("node0", "node1"):
        nodes.assembly.expect_node(name)
    assert not nodes.request("node0").world
    nodes.time += 5
    assert nodes.request("node1").node_count == 2
    assert nodes.receive("node0").node_count == 2


def test_a_live_node_is_waited_for_a_while(nodes: SimulatedNodes) -> None:
    nodes.responsive = {"node0", "node1"}
    for _ in range(int(ASSEMBLY_TIMEOUT_SECONDS // 5)):
        assert not nodes.request("node0").world
        nodes.time += 5
    nodes.time += 1
    assert nodes.request("node0").node_count == 1


def test_an_announcement_expires(nodes: SimulatedNodes) -> None:
    nodes.assembly.expect_node("node1")
    nodes.time += ASSEMBLY_TIMEOUT_SECONDS + 1
    assert nodes.request("node0").world


def test_a_node_that_has_exited_or_is_excluded_is_not_waited_for(nodes: SimulatedNodes) -> None:
    nodes.assembly.expect_node("node1")
    nodes.assembly.forget_node("node1", has_finished=False)
    nodes.assembly.expect_node("node2")
    nodes.responsive, nodes.excluded = {"node2"}, {"node2"}
    assert nodes.request("node0").node_count == 1


def test_a_world_needs_enough_nodes_however_long_that_takes(nodes: SimulatedNodes) -> None:
    for _ in range(100):
        assert not nodes.request("node0", min_nodes=2).world
        nodes.time += 5
    assert nodes.request("node1", min_nodes=2).node_count == 2


def test_an_agent_that_no_longer_repeats_its_request_is_no_member(nodes: SimulatedNodes) -> None:
    nodes.request("node0", min_nodes=2)
    nodes.responsive.clear()
    nodes.time += REQUEST_TIMEOUT_SECONDS + 1
    assert not nodes.request("node1", min_nodes=2).world


def test_a_new_coordinator_has_not_heard_from_all_nodes(nodes: SimulatedNodes) -> None:
    nodes.assembly = WorldAssembly(lambda: nodes.time)
    assert not nodes.request("node0").world
    nodes.time += COORDINATOR_WARMUP_SECONDS + 0.1
    assert nodes.request("node0").world


def test_a_world_of_a_failed_rank_is_over_and_the_next_one_has_all_nodes(nodes: SimulatedNodes) -> None:
    first = nodes.form_world("node0", "node1")["node0"].world
    assert not nodes.is_over("node0")
    nodes.assembly.end_world("another")
    assert not nodes.is_over("node0")
    nodes.assembly.end_world(first, delay=1.0)
    assert not nodes.is_over("node0")
    nodes.time += 1.1
    assert nodes.is_over("node1")
    assert not nodes.request("node0").world, "node1 is alive"
    assert nodes.request("node1").world == nodes.receive("node0").world == "b-1/2"
    assert nodes.assembly.is_over(first)
    assert not nodes.is_over("node0")


def test_a_member_that_requests_the_next_world_has_left_the_newest(nodes: SimulatedNodes) -> None:
    nodes.form_world("node0", "node1")
    assert not nodes.request("node1").world
    assert nodes.is_over("node0")


def test_an_agent_whose_response_was_lost_gets_the_same_again(nodes: SimulatedNodes) -> None:
    nodes.form_world("node0", "node1")
    request = nodes.build_request("node1", previous_world="")
    nodes.assembly.add_request(request)
    assert nodes.assembly.get_assignment(request).world == "b-1/1"
    assert not nodes.is_over("node0")


def test_a_new_agent_of_a_member_is_not_that_member(nodes: SimulatedNodes) -> None:
    """It has the same node, and in a restarted container also the same process id. Its ranks must not join a world that runs."""
    nodes.form_world("node0", "node1")
    nodes.agents["node1"], nodes.worlds["node1"] = "another", ""
    assert not nodes.request("node1").world
    assert nodes.is_over("node0")
    assert nodes.request("node0").world == "b-1/2"


def test_a_running_world_ends_when_all_further_nodes_wait_to_join(nodes: SimulatedNodes) -> None:
    nodes.form_world("node0", "node1")
    nodes.assembly.expect_node("node3")
    assert not nodes.request("node2").world
    assert not nodes.is_over("node0"), "node3 comes, too"
    assert not nodes.request("node3").world
    assert nodes.is_over("node0")
    nodes.request("node0")
    assert nodes.request("node1").node_count == 4


def test_a_world_that_finishes_or_is_full_does_not_end_for_further_nodes(nodes: SimulatedNodes) -> None:
    nodes.form_world("node0", "node1", max_nodes=2)
    assert not nodes.request("node2", max_nodes=2).world
    assert not nodes.is_over("node0")
    nodes.can_interrupt = False
    assert not nodes.request("node3", max_nodes=9).world
    assert not nodes.is_over("node0")


@pytest.mark.parametrize(("has_finished", "is_over"), [(False, True), (True, False)])
def test_a_world_is_over_if_a_node_has_left_it_unfinished(nodes: SimulatedNodes, has_finished: bool, is_over: bool) -> None:
    nodes.form_world("node0", "node1")
    nodes.responsive.remove("node1")
    nodes.assembly.forget_node("node1", has_finished=has_finished)
    assert nodes.is_over("node0") == is_over


def test_another_round_begins_without_the_nodes_of_the_last(nodes: SimulatedNodes) -> None:
    nodes.form_world("node0", "node1")
    old_world = nodes.worlds["node0"]
    nodes.responsive = {"node0"}
    assert nodes.request("node0", round="b-2", agent="new", previous_world="").world == "b-2/2"
    assert not nodes.assembly.is_over(old_world), "supervisors end the agents of an earlier round, with the time that a stop has"
