"""What a run cannot be scaled to is refused with the reason, while nothing has been changed: the place given here can change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtrain.config import Config
from swarmtrain.config.load import parse
from swarmtrain.errors import PlanError
from swarmtrain.launchers import scaled_plan
from swarmtrain.plan import Cargo, Inventory, Machine

TENSOR = "topology: {global_batch_size: 24, micro_batch_size: 2, model_parallel_size: 2}\nrunner: {nodes: 2, min_nodes: 2, max_nodes: 4}"


class Place:
    """A place that can only be asked."""

    def __init__(self, *machines: Machine) -> None:
        self._machines = machines

    def deployed(self, run: str) -> tuple[Config, Cargo]:
        return parse(TENSOR, []), Cargo(())

    def inventory(self) -> Inventory:
        return Inventory("the swarm", self._machines)


def four(**changed: Any) -> Any:
    return Place(*(Machine(host, id=host, **changed.get(host, {})) for host in "abcd"))


def test_a_size_that_fits_is_planned() -> None:
    assert [node.host for node in scaled_plan(four(), "demo", 4).nodes] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("place", "nodes", "match"),
    [
        (four(), 3, "model_parallel_size"),
        (four(c={"unavailable": "down"}), 4, "3 (of 4 )?.*ready|down"),
        (four(), 6, "6"),
    ],
    ids=["no whole replicas", "a node is down", "more than there are"],
)
def test_a_size_that_does_not_fit_is_refused_with_the_reason(place: Any, nodes: int, match: str) -> None:
    with pytest.raises(PlanError, match=match) as raised:
        scaled_plan(place, "demo", nodes)
    assert raised.value.hint
