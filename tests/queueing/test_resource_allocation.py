"""What runs need on a machine: GPUs that they reserve or see, and cores."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.planning.inventory import Machine
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.queueing.decisions.queue_model import Allocation, Ledger, MachineSupply, count_gpus
from swarmtrain.queueing.resource_allocation import build_capacity, compute_allocation

DECLARED = Machine("a", id="a", resources={"NVIDIA-GPU": 8}, cores=32)
PROBED = Machine("a", id="a", gpu_count=8, cores=32)
UNKNOWN = Machine("a", id="a", cores=32)


def compute(machine: Machine, slots: int = 1, gpus: tuple[str, ...] = (), **runner: Any) -> Allocation:
    config = RunnerConfig.model_validate_json(json.dumps(runner))
    return compute_allocation(config, PlannedNode("node0", "a", "", slots, "", gpus), machine)


@pytest.mark.parametrize(
    ("machine", "slots", "gpus", "runner", "expected"),
    [
        (DECLARED, 2, (), {"swarm": {"gpu": "reserve"}}, {"NVIDIA-GPU": 2, "cores": 8}),
        (DECLARED, 8, (), {"swarm": {"gpu": "visible"}}, {"NVIDIA-GPU": 8, "cores": 32}),
        (PROBED, 1, (), {"swarm": {"gpu": "visible"}}, {"NVIDIA-GPU": 8, "cores": 32}),
        (PROBED, 1, ("0", "3"), {"swarm": {"gpu": "visible"}}, {"GPU 0": 1, "GPU 3": 1, "NVIDIA-GPU": 2, "cores": 8}),
        (UNKNOWN, 1, (), {"swarm": {"gpu": "visible"}}, {"GPUs": 1, "cores": 32}),
        (UNKNOWN, 1, (), {}, {"cores": 32}),
        (UNKNOWN, 1, (), {"docker_config": {"cpus": 4}}, {"cores": 4}),
        (UNKNOWN, 1, (), {"docker_config": {"cpus": 64}}, {"cores": 32}),
        (DECLARED, 2, (), {"swarm": {"gpu": "reserve"}, "docker_config": {"cpus": 1.5}}, {"NVIDIA-GPU": 2, "cores": 1.5}),
    ],
)
def test_claims(machine: Machine, slots: int, gpus: tuple[str, ...], runner: dict[str, Any], expected: dict[str, float]) -> None:
    assert compute(machine, slots, gpus, **runner) == Allocation(expected)


def test_reserved_gpus_are_never_shared() -> None:
    allocation = compute(DECLARED, 2, share=True, swarm={"gpu": "reserve"})
    assert allocation == Allocation({"NVIDIA-GPU": 2.0}, {"cores": 8.0})
    assert compute(PROBED, share=True, swarm={"gpu": "visible"}) == Allocation({}, {"NVIDIA-GPU": 8.0, "cores": 32.0})


@pytest.mark.parametrize(
    ("first", "second", "fit"),
    [
        (("0",), ("1",), True),
        (("0",), ("0", "1"), False),
        ((), ("1",), False),
        (("GPU-abc",), ("GPU-def",), True),
    ],
)
@pytest.mark.parametrize("machine", [DECLARED, PROBED, UNKNOWN])
def test_selected_gpus_are_given_once(machine: Machine, first: tuple[str, ...], second: tuple[str, ...], fit: bool) -> None:
    """Also where the number of GPUs is unknown."""
    ledger = Ledger((MachineSupply("a", "a", build_capacity(machine)),))
    runner = {"swarm": {"gpu": "visible"}, "docker_config": {"cpus": 1}}
    ledger.add("a", compute(machine, 1, first, **runner))
    assert ledger.fits("a", compute(machine, 1, second, **runner)) == fit


def test_gpus_are_counted_for_limits() -> None:
    assert count_gpus(compute(DECLARED, 2, swarm={"gpu": "reserve"})) == 2
    assert count_gpus(compute(PROBED, 1, ("0", "3"), swarm={"gpu": "visible"})) == 2
    assert count_gpus(compute(UNKNOWN, 1, ("0", "3"), swarm={"gpu": "visible"})) == 2
    assert count_gpus(compute(UNKNOWN)) == 0
