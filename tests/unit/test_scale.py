"""A size that a run cannot be scaled to is refused with the reason before anything changes: the stub launcher cannot change anything."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.loader import parse_config
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.errors import PlanError
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.swarm.plan_checks import _check_subnet_size
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement

TENSOR = "topology: {global_batch_size: 24, micro_batch_size: 2, model_parallel_size: 2}\nrunner: {nodes: 2, min_nodes: 2, max_nodes: 4}"


class StubLauncher:
    """A launcher that can only be queried."""

    def __init__(self, *machines: Machine, placement: Placement = FRESH_PLACEMENT) -> None:
        self._machines, self._placement = machines, placement

    def read_placement(self, run: str) -> Placement:
        return self._placement

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        return parse_config(TENSOR, []), Cargo(())

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        return Inventory("the swarm", self._machines)


def build_four_machines(**changes: Any) -> Any:
    return StubLauncher(*(Machine(host, id=host, **changes.get(host, {})) for host in "abcd"))


def test_a_size_that_fits_is_planned() -> None:
    assert [node.host for node in plan_scaled_run(build_four_machines(), "demo", ScaleRequest(4)).nodes] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("place", "nodes", "match"),
    [
        (build_four_machines(), 3, "model_parallel_size"),
        (build_four_machines(c={"unavailable_reason": "down"}), 4, "not a multiple of .*; c is down"),
        (build_four_machines(), 6, "6 nodes requested, but 4 can be used on the swarm"),
    ],
    ids=["no whole replicas", "a node is down", "more than there are"],
)
def test_a_size_that_does_not_fit_is_refused_with_the_reason(place: Any, nodes: int, match: str) -> None:
    with pytest.raises(PlanError, match=match) as raised:
        plan_scaled_run(place, "demo", ScaleRequest(nodes))
    assert raised.value.hint


class SmallSubnetLauncher(StubLauncher):
    """A launcher with eight machines, and a run of up to four nodes whose subnet has 16 addresses."""

    def __init__(self) -> None:
        super().__init__(*(Machine(host, id=host) for host in "abcdefgh"))

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        return parse_config("runner: {nodes: 2, min_nodes: 1, max_nodes: 4, swarm: {subnet: 10.20.0.0/28}}"), Cargo(())


def test_a_subnet_that_is_too_small_for_the_new_size_is_a_finding() -> None:
    launcher: Any = SmallSubnetLauncher()
    assert _check_subnet_size(plan_scaled_run(launcher, "demo", ScaleRequest(5))) == []
    [finding] = _check_subnet_size(plan_scaled_run(launcher, "demo", ScaleRequest(6)))
    assert finding.message.startswith("10.20.0.0/28 has 16 addresses, but a run of up to 6 nodes needs 17, at least a /27: ")


SWARM = "runner: {nodes: 2, min_nodes: 1, max_nodes: 4, hosts: %s}"


class RunningLauncher(StubLauncher):
    """A launcher with a run on b and c, of the hosts a to d."""

    def __init__(self, hosts: str = "null") -> None:
        machines = [*(Machine(host, id=f"id-{host}") for host in "abcd"), Machine("down", id="id-down", unavailable_reason="drained")]
        super().__init__(*machines, placement=Placement({"node0": "b", "node1": "id-c"}))
        self._hosts = hosts

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        return parse_config(SWARM % self._hosts), Cargo(())


def list_scaled_nodes(launcher: Any, request: ScaleRequest) -> dict[str, str]:
    return {node.name: node.host for node in plan_scaled_run(launcher, "demo", request).nodes}


@pytest.mark.parametrize("hosts", ["null", "[b, id-c, a]"])
@pytest.mark.parametrize(
    ("request_", "nodes"),
    [
        (ScaleRequest(3), {"node0": "b", "node1": "c", "node2": "a"}),
        (ScaleRequest(1), {"node0": "b"}),
        (ScaleRequest(added_hosts=("d",)), {"node0": "b", "node1": "c", "node2": "d"}),
        (ScaleRequest(removed_hosts=("b",)), {"node1": "c"}),
        (ScaleRequest(removed_hosts=("c",)), {"node0": "b"}),
        (ScaleRequest(replaced_hosts=("id-c",)), {"node0": "b", "node1": "a"}),
        (ScaleRequest(added_hosts=("d",), replaced_hosts=("b",), node_count=2), {"node0": "d", "node1": "c"}),
        (ScaleRequest(added_hosts=("a",)), {"node0": "b", "node1": "c", "node2": "a"}),
        (ScaleRequest(removed_hosts=("c", "id-c")), {"node0": "b"}),
        (ScaleRequest(added_hosts=("d", "id-d")), {"node0": "b", "node1": "c", "node2": "d"}),
    ],
    ids=["up", "down", "add", "without", "without by another name", "replace", "replace by", "add a spare", "twice", "add twice"],
)
def test_hosts_are_added_removed_and_replaced(hosts: str, request_: ScaleRequest, nodes: dict[str, str]) -> None:
    assert list_scaled_nodes(RunningLauncher(hosts), request_) == nodes


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ScaleRequest(removed_hosts=("a",)), "scale --without: no node of demo runs on a"),
        (ScaleRequest(replaced_hosts=("nowhere",)), "scale --replace: no node of demo runs on nowhere"),
        (ScaleRequest(added_hosts=("c",)), "scale --add: a node of demo already runs on c"),
        (ScaleRequest(added_hosts=("e",)), "scale --add: e is not in the swarm\nhint: its hosts: "),
        (ScaleRequest(added_hosts=("a b",)), "scale --add: 'a b' is not a valid host"),
        (ScaleRequest(added_hosts=("-Fevil.conf",)), "scale --add: -Fevil.conf: a host name cannot begin with '-'"),
        (ScaleRequest(added_hosts=("d slots=2",)), "scale --add: 'd slots=2': only the name of a host can be given"),
        (ScaleRequest(added_hosts=("d",), node_count=2), "scale --nodes: 2 nodes have no place for d: the other hosts keep their nodes"),
        (ScaleRequest(removed_hosts=("b", "c")), "scale --without: no node would be left"),
        (ScaleRequest(added_hosts=("down",)), "scale --add: down cannot run a node: drained"),
    ],
)
def test_hosts_that_cannot_be_changed_are_refused(request_: ScaleRequest, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_scaled_run(cast("Any", RunningLauncher()), "demo", request_)
    assert f"error: {message}" in caught.value.plain_text


def test_a_list_of_hosts_is_a_limit_that_add_extends() -> None:
    with pytest.raises(PlanError, match="lists 2 hosts, but 3 nodes") as caught:
        list_scaled_nodes(RunningLauncher("[b, c]"), ScaleRequest(3))
    assert "swarmtrain scale --add HOST" in str(caught.value.hint)
    assert list_scaled_nodes(RunningLauncher("[b, c]"), ScaleRequest(added_hosts=("d slots=1",)))["node2"] == "d"
