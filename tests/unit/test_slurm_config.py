"""`runner.slurm`, and the properties that Slurm's nodes have in common."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.launchers.planner import read_inventory
from swarmtrain.planning.plan import build_plan


def build_slurm_config(**runner: object) -> Config:
    return Config.from_json(json.dumps({"runner": {"runner_type": "slurm", **runner}}))


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        ({"hosts": ["a slots=2", "b slots=4"]}, "slurm gives every node of a job the same"),
        ({"slurm": {"options": ["exclusive"]}}, "is not an sbatch option"),
        ({"slurm": {"partition": "gpu\n#SBATCH --uid=0"}}, "one line of printable characters"),
        ({"slurm": {"account": "two words"}}, "must not contain a space"),
        ({"slurm": {"prelude": ["module load\nrm"]}}, "one line of printable characters"),
    ],
)
def test_what_slurm_would_refuse(runner: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        build_slurm_config(**runner)


@pytest.mark.parametrize(
    ("slurm", "slots"), [({"gpus_per_node": 4}, 4), ({"gres": "gpu:2"}, 2), ({"gres": "lustre:1,gpu:a100:8"}, 8), ({"gres": "lustre:5"}, 1)]
)
def test_slots_are_the_gpus_of_a_node(slurm: dict[str, object], slots: int) -> None:
    wanted = build_slurm_config(nodes=2, slurm=slurm)
    assert [node.slots for node in build_plan(wanted, read_inventory(wanted), Cargo(()), run="demo").nodes] == [slots, slots]
