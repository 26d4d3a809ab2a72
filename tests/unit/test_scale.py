"""A size that a run cannot be scaled to is refused with the reason before anything changes: the stub launcher cannot change anything."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.loader import parse_config
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.errors import PlanError
from swarmtrain.launchers.planner import plan_scaled_run
from swarmtrain.plan import Inventory, Machine

TENSOR = "topology: {global_batch_size: 24, micro_batch_size: 2, model_parallel_size: 2}\nrunner: {nodes: 2, min_nodes: 2, max_nodes: 4}"


class StubLauncher:
    """A launcher that can only be queried."""

    def __init__(self, *machines: Machine) -> None:
        self._machines = machines

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        return parse_config(TENSOR, []), Cargo(())

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        return Inventory("the swarm", self._machines)


def build_four_machines(**changes: Any) -> Any:
    return StubLauncher(*(Machine(host, id=host, **changes.get(host, {})) for host in "abcd"))


def test_a_size_that_fits_is_planned() -> None:
    assert [node.host for node in plan_scaled_run(build_four_machines(), "demo", 4).nodes] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("place", "nodes", "match"),
    [
        (build_four_machines(), 3, "model_parallel_size"),
        (build_four_machines(c={"unavailable_reason": "down"}), 4, "3 (of 4 )?.*ready|down"),
        (build_four_machines(), 6, "6"),
    ],
    ids=["no whole replicas", "a node is down", "more than there are"],
)
def test_a_size_that_does_not_fit_is_refused_with_the_reason(place: Any, nodes: int, match: str) -> None:
    with pytest.raises(PlanError, match=match) as raised:
        plan_scaled_run(place, "demo", nodes)
    assert raised.value.hint
