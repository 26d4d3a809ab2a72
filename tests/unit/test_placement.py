"""Placement: a node keeps its machine while the machine is wanted and usable, whatever else changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from randomized import count_examples

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config.loader import parse_config
from swarmtrain.errors import PlanError
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement, assign_nodes
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.render.stack_document import render_stack

CARGO = Cargo((RunFile.from_content("training_code.py", b"train()"),))


def make_plan(inventory: Inventory, hosts: list[str] | None, node_count: int, placement: Placement, network: str = "") -> Plan:
    text = (
        f"runner: {{nodes: {node_count}, min_nodes: 1, max_nodes: 64, hosts: {hosts or 'null'}, swarm: {{network: {network or 'null'}}}}}"
    )
    return build_plan(parse_config(text), inventory, CARGO, run="demo", placement=placement)


def get_placement(plan: Plan) -> Placement:
    coordinator = plan.coordinator_machine
    return Placement({node.name: node.constraint.partition("==")[2] for node in plan.nodes}, coordinator.id if coordinator else "")


def make_inventory(*hosts: str, down: str = "") -> Inventory:
    reasons = {host: "down" if host in down.split() else "" for host in hosts}
    machines = (
        Machine(host, f"id-{host}", f"10.0.0.{number}", is_manager=True, unavailable_reason=reasons[host])
        for number, host in enumerate(hosts)
    )
    return Inventory("the swarm", tuple(machines))


def list_hosts(plan: Plan) -> dict[str, str]:
    return {node.name: node.host for node in plan.nodes}


def test_a_machine_that_joins_moves_no_node() -> None:
    first = make_plan(make_inventory("b", "c"), None, 2, FRESH_PLACEMENT)
    second = make_plan(make_inventory("a", "b", "c"), None, 2, get_placement(first))
    assert list_hosts(second) == list_hosts(first) == {"node0": "b", "node1": "c"}
    assert [node.cause for node in second.nodes] == ["keeps its host; one slot"] * 2
    assert list_hosts(make_plan(make_inventory("a", "b", "c"), None, 3, get_placement(first))) == {"node0": "b", "node1": "c", "node2": "a"}


def test_a_dead_host_is_replaced_and_the_others_stay() -> None:
    first = make_plan(make_inventory("a", "b", "c"), None, 3, FRESH_PLACEMENT)
    second = make_plan(make_inventory("a", "b", "c", "d", down="b"), None, 3, get_placement(first))
    assert list_hosts(second) == {"node0": "a", "node1": "d", "node2": "c"}
    assert list_hosts(make_plan(make_inventory("a", "b", "c", down="b"), None, 2, get_placement(first))) == {"node0": "a", "node2": "c"}


def test_hosts_may_be_listed_in_any_order() -> None:
    inventory = make_inventory("a", "b", "c", "d")
    first = make_plan(inventory, ["a", "b", "c"], 3, FRESH_PLACEMENT)
    second = make_plan(inventory, ["d", "c", "a"], 3, get_placement(first))
    assert list_hosts(second) == {"node0": "a", "node1": "d", "node2": "c"}
    assert second.nodes[0].cause == "keeps its host, entry 3 of hosts; one slot"
    assert second.nodes[1].cause == "entry 1 of hosts; one slot"


def test_a_listed_spare_replaces_a_host_that_is_down() -> None:
    inventory = make_inventory("a", "b", "c", down="b")
    assert list_hosts(make_plan(inventory, ["a", "b", "c"], 2, FRESH_PLACEMENT)) == {"node0": "a", "node1": "c"}
    assert list_hosts(make_plan(inventory, ["gone", "a", "c"], 2, FRESH_PLACEMENT)) == {"node0": "a", "node1": "c"}
    with pytest.raises(PlanError, match=r"config runner\.hosts: gone: the node is not in the swarm"):
        make_plan(inventory, ["gone"], 1, FRESH_PLACEMENT)
    with pytest.raises(PlanError, match=r"config runner\.hosts: b: the node is down"):
        make_plan(inventory, ["b"], 1, FRESH_PLACEMENT)


def list_missing(plan: Plan) -> dict[str, str]:
    return {node.name: f"{node.host} is {node.missing_reason}" for node in plan.missing_nodes}


@pytest.mark.parametrize("hosts", [None, ["a", "b", "c"]])
def test_a_host_that_is_down_waits_while_enough_are_left(hosts: list[str] | None) -> None:
    plan = make_plan(make_inventory("a", "b", "c", down="b"), hosts, 3, FRESH_PLACEMENT)
    assert list_hosts(plan) == {"node0": "a", "node1": "c", "node2": "b"}
    assert list_missing(plan) == {"node2": "b is down"}
    assert "2 of 3 nodes with 2 ranks; elastic: 1 to 64 nodes" in str(plan)
    assert "waits, because the host is down; " in str(plan)
    assert plan.to_dict()["missing"] == [{"name": "node2", "host": "b", "reason": "down"}]
    again = make_plan(make_inventory("a", "b", "c"), hosts, 3, get_placement(plan))
    assert (list_hosts(again), list_missing(again)) == (list_hosts(plan), {})
    assert render_stack(again).document["services"] == render_stack(plan).document["services"]


def test_a_running_node_keeps_its_host_while_the_host_is_down() -> None:
    first = make_plan(make_inventory("a", "b", "c"), None, 3, FRESH_PLACEMENT)
    second = make_plan(make_inventory("a", "b", "c", "d", down="b d"), None, 3, get_placement(first))
    assert list_hosts(second) == list_hosts(first)
    assert list_missing(second) == {"node1": "b is down"}


def test_a_listed_host_that_is_unknown_is_an_error_if_it_is_needed() -> None:
    """Its name may be misspelled. The doctor reports it, and examines the others."""
    inventory = make_inventory("a", "b", "c", down="c")
    with pytest.raises(PlanError, match=r"config runner\.hosts: gone: the node is not in the swarm \(its nodes: a, b, c\)"):
        make_plan(inventory, ["a", "gone", "b"], 3, FRESH_PLACEMENT)
    assert list_missing(make_plan(inventory, ["gone", "a", "b", "c"], 3, FRESH_PLACEMENT)) == {"node2": "c is down"}
    config = parse_config("runner: {hosts: [a, gone, b]}")
    plan = build_plan(config, inventory, CARGO, run="demo", min_nodes=0)
    assert list_missing(plan) == {"node2": "gone is not in the swarm (its nodes: a, b, c)"}


def test_fewer_machines_than_requested_are_enough_if_min_nodes_says_so() -> None:
    plan = make_plan(make_inventory("a", "b"), None, 4, FRESH_PLACEMENT)
    assert list_hosts(plan) == {"node0": "a", "node1": "b"}
    assert "2 of 4 nodes with 2 ranks" in str(plan)
    assert "no machine for 2 nodes; deploy or scale again when more have joined" in str(plan)


def build_shortage_error(hosts: str, *machines: Machine) -> PlanError:
    config = parse_config(f"runner: {{nodes: 3, min_nodes: 2, hosts: {hosts}}}")
    with pytest.raises(PlanError) as raised:
        build_plan(config, Inventory("the swarm", (Machine("a"), *machines)), CARGO, run="demo")
    return raised.value


@pytest.mark.parametrize(("hosts", "place"), [("null", "config runner.nodes"), ("[a, b, c]", "config runner.hosts")])
def test_fewer_than_min_nodes_are_an_error_with_all_reasons(hosts: str, place: str) -> None:
    error = build_shortage_error(hosts, *(Machine(name, unavailable_reason="down", unavailable_hint="start it") for name in "bc"))
    message = f"{place}: at least 2 of 3 nodes requested, but 1 can be used on the swarm (b is down; c is down)"
    assert [text for text, _ in error.messages_with_hints] == [message]
    assert error.hint


def test_machines_with_different_problems_are_listed_with_their_hints() -> None:
    machines = [Machine(name, unavailable_reason=f"without {name}", unavailable_hint=f"fix {name}") for name in "bc"]
    assert build_shortage_error("[a, b, c]", *machines).messages_with_hints == (
        ("config runner.hosts: at least 2 of 3 nodes requested, but 1 can be used on the swarm", None),
        ("config runner.hosts: b: the node is without b", "fix b"),
        ("config runner.hosts: c: the node is without c", "fix c"),
    )


def test_a_launcher_that_cannot_start_missing_nodes_does_not_create_them() -> None:
    machines = (Machine("a"), Machine("b", unavailable_reason="not usable over SSH (no route)"), Machine("c"))
    config = parse_config("runner: {runner_type: ssh, hosts: [a, b, c], min_nodes: 2}")
    plan = build_plan(config, Inventory("the hosts", machines), CARGO, run="demo")
    assert list_hosts(plan) == {"node0": "a", "node1": "c"}
    assert "without b, which is not usable over SSH (no route); deploy or scale again to add it" in str(plan)
    later = build_plan(
        config, Inventory("the hosts", tuple(Machine(host) for host in "abc")), CARGO, run="demo", placement=get_placement(plan)
    )
    assert list_hosts(later) == {"node0": "a", "node1": "c", "node2": "b"}


def test_a_host_that_a_check_refuses_is_missing() -> None:
    plan = make_plan(make_inventory("a", "b", "c"), None, 3, FRESH_PLACEMENT)
    reduced = plan.exclude_hosts({"b": ("without the mount", "mount it")})
    assert (list_hosts(reduced), list_missing(reduced)) == (list_hosts(plan), {"node1": "b is without the mount"})
    assert (reduced.world_size, reduced.can_form_world) == (2, True)
    assert not make_plan(make_inventory("a"), None, 1, FRESH_PLACEMENT).exclude_hosts({"a": ("down", "")}).can_form_world


def test_a_machine_that_has_joined_twice_is_its_available_entry() -> None:
    machines = (Machine("a", id="old", unavailable_reason="down"), Machine("a", id="new"))
    config = parse_config("runner: {hosts: [a]}")
    assert build_plan(config, Inventory("the swarm", machines), CARGO, run="demo").missing_nodes == ()


def test_the_coordinator_keeps_its_manager_on_the_host_network() -> None:
    first = make_plan(make_inventory("b", "c"), None, 2, FRESH_PLACEMENT, network="host")
    second = make_plan(make_inventory("a", "b", "c"), None, 2, get_placement(first), network="host")
    assert [plan.coordinator_machine.host for plan in (first, second) if plan.coordinator_machine] == ["b", "b"]


@dataclass
class SimulatedCluster:
    """A cluster that changes at random. The host names are in no order."""

    random: random.Random
    machines: dict[str, Machine] = field(default_factory=dict)
    hosts: list[str] | None = None
    requested_nodes: int = 1

    def change(self) -> None:
        """Let a machine join, leave, fail, recover or be drained, edit `hosts`, or scale up or down."""
        names = list(self.machines)
        kind = self.random.choice(["join", "join", "leave", "state", "state", "edit", "scale", "scale"])
        if kind == "join" and len(names) < 12:
            name = f"m{self.random.randrange(1000)}"
            self.machines.setdefault(name, Machine(name, f"id-{name}", f"10.0.0.{len(names)}", is_manager=True))
        elif kind == "leave" and len(names) > 1:
            del self.machines[self.random.choice(names)]
        elif kind == "state" and names:
            name = self.random.choice(names)
            self.machines[name] = replace(self.machines[name], unavailable_reason=self.random.choice(["", "", "down", "drained"]))
        elif kind == "edit" and names:
            self.hosts = self.random.choice([None, self.random.sample(names, len(names))[: self.random.randint(1, 12)]])
        elif kind == "scale":
            self.requested_nodes = self.random.randint(1, 8)

    @property
    def node_count(self) -> int:
        """Number of nodes in the config: no more than `hosts`."""
        return self.requested_nodes if self.hosts is None else min(self.requested_nodes, len(self.hosts))

    def list_usable_hosts(self) -> set[str]:
        """Return the hosts that the config wants, and that can run a node."""
        wanted = self.machines if self.hosts is None else [host for host in self.hosts if host in self.machines]
        return {host for host in wanted if not self.machines[host].unavailable_reason}

    def plan(self, placement: Placement) -> Plan | None:
        """Return the new plan; None if there are too few usable hosts, or a host is missing."""
        by_name = sorted(self.machines.values(), key=lambda machine: machine.host)
        try:
            return make_plan(Inventory("the swarm", tuple(by_name)), self.hosts, self.node_count, placement)
        except PlanError:
            return None


def check_sequence(seed: int, *, steps: int, with_specs: bool) -> int:
    """Follow one run through random changes of its cluster. Return the number of plans that were compared."""
    cluster, previous, compared = SimulatedCluster(random.Random(seed)), None, 0  # noqa: S311
    for _ in range(steps):
        cluster.change()
        plan = cluster.plan(get_placement(previous) if previous else FRESH_PLACEMENT)
        if plan is None:
            continue
        if previous is not None:
            compared += 1
            check_change(previous, plan, cluster, with_specs=with_specs)
        previous = plan
    return compared


def check_change(before: Plan, after: Plan, cluster: SimulatedCluster, *, with_specs: bool) -> None:
    old, new = list_hosts(before), list_hosts(after)
    usable, node_count = cluster.list_usable_hosts(), cluster.node_count
    assert len(set(new.values())) == len(new) <= node_count
    assert {node.host for node in after.available_nodes} <= usable
    assert {node.host for node in after.missing_nodes}.isdisjoint(usable)
    # All usable hosts are used before a node waits for another one.
    assert len(after.available_nodes) == min(node_count, len(usable))
    # No service is interrupted whose host did not change, and each host that is still usable is kept while there are enough nodes.
    interrupted = [node for node in old if new.get(node) != old[node]]
    assert not [node for node in interrupted if old[node] in new.values()]
    assert len(interrupted) <= len(set(old.values()) ^ set(new.values()))
    still_usable = [node for node in old if old[node] in usable]
    assert sum(new.get(node) == old[node] for node in still_usable) == min(len(still_usable), node_count)
    if with_specs and before.config.runner.node_range[0] == after.config.runner.node_range[0]:
        documents = [render_stack(plan).document["services"] for plan in (before, after)]
        kept = [node for node in old if new.get(node) == old[node]]
        assert [documents[0][node] for node in kept] == [documents[1][node] for node in kept]


def test_random_changes_interrupt_only_nodes_whose_host_changes() -> None:
    """Sequences of joins, failures, drains, edits of hosts, and scaling up and down."""
    count = count_examples(fixed=2_000, seeded=10_000)
    assert sum(check_sequence(seed, steps=6, with_specs=False) for seed in range(count)) > count


def test_the_service_of_a_node_that_stays_is_identical() -> None:
    assert sum(check_sequence(seed, steps=12, with_specs=True) for seed in range(100)) > 200


def test_numbers_that_are_free_are_filled_from_the_lowest() -> None:
    placement = Placement({"node0": "a", "node3": "b"})
    assert assign_nodes("abcd", "abcd", 4, placement) == [("node0", "a"), ("node1", "c"), ("node2", "d"), ("node3", "b")]
    assert assign_nodes("abcd", "abcd", 1, placement) == [("node0", "a")]
    assert assign_nodes("cd", "cd", 3, placement) == [("node0", "c"), ("node1", "d")]
