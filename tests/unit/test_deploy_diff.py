"""What a deploy would change is a function of the plan and of the deployed config."""

from __future__ import annotations

import pytest

from swarmtrain.cargo import Cargo
from swarmtrain.config.loader import parse_config
from swarmtrain.launchers.base import TaskState
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.view.deploy_diff import list_differences


def plan_demo(*overrides: str) -> Plan:
    config = parse_config("topology: {global_batch_size: 24, micro_batch_size: 2}", overrides)
    return build_plan(config, Inventory("the swarm", (Machine("a", id="1"),)), Cargo(()), run="demo")


def compare(deployed: tuple[str, ...], new: tuple[str, ...], *, restarted: int = 0, has_checkpoint: bool = False) -> list[str]:
    tasks = [TaskState("node0", "a", "running")]
    return list_differences(plan_demo(*new), plan_demo(*deployed).config, Cargo(()), tasks, restarted, has_checkpoint=has_checkpoint)


def test_an_entry_of_an_empty_mapping_is_the_only_difference() -> None:
    filled = ("runner.env={A: '1'}",)
    assert compare((), filled) == ['runner.env.A: null → "1"']
    assert compare(filled, ()) == ['runner.env.A: "1" → null']
    assert compare(filled, filled) == []


@pytest.mark.parametrize(
    ("deployed_folder", "folder", "has_checkpoint", "start_point"),
    [
        ("runs/a", "runs/a", True, "from the last checkpoint"),
        ("runs/a", "runs/a", False, "although it has not reported a checkpoint yet"),
        ("runs/a", "runs/b", True, "from the newest checkpoint in runs/b, if there is one"),
        ("runs/a", "null", True, "from the beginning: trainer.save_dir is null"),
    ],
)
def test_where_a_restarted_run_resumes(deployed_folder: str, folder: str, has_checkpoint: bool, start_point: str) -> None:
    new = (f"trainer.save_dir={folder}", "trainer.seed=7")
    differences = compare((f"trainer.save_dir={deployed_folder}",), new, restarted=2, has_checkpoint=has_checkpoint)
    assert differences[-1] == f"trainer.seed: 42 → 7, restarts 2 services {start_point}"
