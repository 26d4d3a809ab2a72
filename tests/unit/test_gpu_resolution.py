"""The GPU mode of a plan whose config does not set runner.swarm.gpu, and what the nodes and services get from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config.loader import parse_config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.errors import PlanError
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.render.compose_file import render_compose
from swarmtrain.render.stack_document import render_stack

CARGO = Cargo((RunFile.from_content("training_code.py", b""),))


def plan_demo(*machines: Machine, overrides: tuple[str, ...] = (), nodes: int | None = None) -> Plan:
    return build_plan(parse_config("{}", overrides), Inventory("the swarm", machines), CARGO, run="demo", node_count=nodes)


def declare(host: str, count: int, **fields: Any) -> Machine:
    return Machine(host, resources={"NVIDIA-GPU": count}, **fields)


def probe(host: str, count: int | None) -> Machine:
    return Machine(host, gpu_count=count)


SLURM_GPUS = ("runner.runner_type=slurm", "runner.slurm.gpus_per_node=4")
NO_GPUS_KNOWN = "gpu: none (no host is known to have GPUs; swarmtrain doctor CONFIG looks for them)"


@pytest.mark.parametrize(
    ("machines", "overrides", "mode", "slots", "note"),
    [
        ((declare("a", 8),), (), "reserve", [8], "gpu: reserve (the hosts declare NVIDIA-GPU)"),
        ((probe("a", 4),), (), "visible", [4], "gpu: visible (the hosts have GPUs)"),
        ((Machine("a"),), (), "none", [1], NO_GPUS_KNOWN),
        ((probe("a", 0),), (), "none", [1], "gpu: none (the hosts have no GPUs)"),
        ((declare("a", 8),), ("runner.swarm.generic_resource=A100",), "none", [1], NO_GPUS_KNOWN),
        ((declare("a", 8),), ("runner.swarm.gpu=none",), "none", [1], ""),
        ((declare("a", 8),), ("runner.swarm.gpu=visible",), "visible", [8], ""),
        ((probe("a", 8),), ("runner.swarm.gpu=reserve",), "reserve", [1], ""),
        ((declare("a", 8), probe("b", 4)), ("runner.nodes=2",), "visible", [8, 4], "gpu: visible (the hosts have GPUs)"),
        ((declare("a", 8),), ("runner.hosts=[a slots=2]",), "reserve", [2], "gpu: reserve (the hosts declare NVIDIA-GPU)"),
        ((Machine("a"),), ("runner.hosts=['a slots=0,2']",), "visible", [2], "gpu: visible (the config lists GPUs)"),
        ((Machine("a"),), ("runner.swarm.gpu_ids=[1,3]",), "visible", [2], "gpu: visible (the config lists GPUs)"),
        (
            (declare("a", 8), probe("b", 0)),
            ("runner.hosts=[a, b]",),
            "none",
            [1, 1],
            "gpu: none (a has GPUs, but not b)",
        ),
        ((Machine("a"),), ("runner.runner_type=docker",), "none", [1], "gpu: none (to use GPUs, set runner.swarm.gpu: visible)"),
        ((Machine("a"),), ("runner.runner_type=local",), "none", [1], ""),
        ((declare("a", 8),), ("runner.runner_type=ssh", "runner.hosts=[a]"), "visible", [8], "gpu: visible (the hosts have GPUs)"),
        ((declare("a", 0),), ("runner.runner_type=ssh", "runner.hosts=[a]"), "none", [1], ""),
        ((Machine("a"),), SLURM_GPUS, "visible", [4], "gpu: visible (Slurm allocates GPUs)"),
        ((Machine("a"),), ("runner.runner_type=slurm",), "none", [1], ""),
    ],
)  # fmt: skip
def test_gpus_are_used_where_they_are_known(
    machines: tuple[Machine, ...], overrides: tuple[str, ...], mode: str, slots: list[int], note: str
) -> None:
    plan = plan_demo(*machines, overrides=overrides)
    assert (plan.gpu_mode, [node.slots for node in plan.nodes]) == (GpuMode(mode), slots)
    assert [line for line in str(plan).splitlines() if "gpu:" in line] == ([f"  {note}"] if note else [])


def test_a_run_gets_the_machines_with_gpus() -> None:
    machines = (Machine("a-manager", is_manager=True), declare("gpu-1", 4), declare("gpu-2", 4, unavailable_reason="down"))
    plan = plan_demo(*machines, overrides=("runner.nodes=2", "runner.min_nodes=1"))
    assert {node.host: node.missing_reason for node in plan.nodes} == {"gpu-1": "", "gpu-2": "down"}
    assert plan.nodes[0].cause == "1 of 1 ready node with GPUs, by name; one slot per NVIDIA-GPU"
    # A run that reserves GPUs is scaled onto machines with GPUs only, and one that wants more nodes than these does not use any.
    with pytest.raises(PlanError, match=r"3 nodes requested, but 1 can be used on the swarm \(gpu-2 is down; a-manager has no GPUs\)"):
        plan_demo(*machines, overrides=("runner.nodes=3", "runner.swarm.gpu=reserve"))
    assert plan_demo(*machines, overrides=("runner.nodes=3", "runner.min_nodes=2")).notes[0].startswith("gpu: none (gpu-1, gpu-2 have GPUs")


def test_visible_gpus_are_looked_for_on_machines_that_were_not_probed() -> None:
    plan = plan_demo(probe("a", None), probe("b", 0), probe("c", 2), overrides=("runner.nodes=2", "runner.swarm.gpu=visible"))
    assert [(node.host, node.slots) for node in plan.nodes] == [("c", 2), ("a", 1)]


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        (probe("a", 4), (), "4"),
        (declare("a", 4), (), "4+"),
        (probe("a", 4), ("runner.default_gpu_count=2",), "2+"),
        (declare("a", 4), ("runner.swarm.gpu=none",), None),
        (Machine("a"), (), None),
    ],
)
def test_the_nodes_know_how_many_gpus_the_plan_assumes(machine: Machine, overrides: tuple[str, ...], expected: str | None) -> None:
    plan = plan_demo(machine, overrides=overrides)
    for stack in (render_stack(plan), render_compose(plan)):
        services = stack.document["services"]
        assert services["node0"]["environment"].get("SWARMTRAIN_GPUS") == expected
        assert "SWARMTRAIN_GPUS" not in services["rendezvous"]["environment"]


def test_services_without_gpus_are_those_of_a_config_that_says_none() -> None:
    """An upgrade does not restart runs on CPUs: before, `none` was the default."""
    unset, explicit = (render_stack(plan_demo(Machine("a"), overrides=overrides)) for overrides in ((), ("runner.swarm.gpu=none",)))
    assert unset.document == explicit.document
    assert unset.files == explicit.files
    config = json.loads(next(content for name, content in unset.files.items() if "config" in name))
    assert config["runner"]["swarm"]["gpu"] == "none"
