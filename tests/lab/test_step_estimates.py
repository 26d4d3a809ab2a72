"""The time per step that `plan` estimates from what doctor has measured, compared with runs over links of three speeds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import pytest
from swarm_helpers import print_line
from training_helpers import ROOT, build_options

from swarmtrain import process
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.launchers.swarm.machines.measurements import read_measurements

pytestmark = pytest.mark.test_all_only("trains over links of three speeds; tests/unit has the formulas")

_STEPS, _WARMUP_STEPS = 12, 3
_GLOBAL_BATCH, _SEQUENCE_LENGTH = 12, 128
_TOLERANCE = 0.25
_SETTINGS = [
    "runner.nodes=2",
    "runner.min_nodes=2",
    "runner.max_nodes=2",
    f"topology.global_batch_size={_GLOBAL_BATCH}",
    f"trainer.train_iterations={_STEPS}",
    "trainer.save_interval=null",
    "logger.log_interval=1",
    "transformer_architecture.hidden_size=256",
    "transformer_architecture.num_layers=4",
]


@pytest.fixture
def two_nodes(create_lab: Callable[[str], Lab], image: str) -> Lab:
    lab = create_lab("estimates")
    lab.bring_up(2, report_progress=print_line)
    return lab


def test_the_estimated_time_per_step_is_that_of_a_run(two_nodes: Lab, image: str) -> None:
    """Within 25 %, at full speed, at 1 Gbit/s and at 100 Mbit/s; the links' share is most of the last one."""
    lab, errors = two_nodes, {}
    for rate in ("", "1gbit", "100mbit"):
        for node in ("node0", "node1"):
            if rate:
                lab.limit_node_bandwidth(node, rate, report_progress=print_line)
        run = f"at-{rate or 'full-speed'}"
        options = build_options(image, run, *_SETTINGS)
        run_swarmtrain(lab, "doctor", "examples/quickstart.yml", "--step-times", "--name", run, *options)
        plan = json.loads(run_swarmtrain(lab, "plan", "examples/quickstart.yml", "--json", "--name", run, *options))
        estimated = plan["step_estimates"]["rows"][0]
        assert estimated["name"] == "ddp"
        run_swarmtrain(lab, "deploy", "examples/quickstart.yml", "--name", run, *options)
        measured = read_step_seconds(lab, run)
        run_swarmtrain(lab, "down", run, "--yes")
        errors[rate] = estimated["seconds"] / measured - 1
        print_line(
            f"{run}: estimated {estimated['seconds']:.3f} s, {estimated['network_seconds']:.3f} s of it network; measured {measured:.3f} s "
            f"({errors[rate]:+.0%})"
        )
    assert max(map(abs, errors.values())) <= _TOLERANCE, errors
    assert estimated["network_seconds"] > estimated["seconds"] / 2
    assert len(read_measurements(SwarmLauncher(lab.get_docker_host("node0"))._engine)) == 3


def run_swarmtrain(lab: Lab, *argv: str) -> str:
    environment = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0")}
    return process.run_command([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT, env=environment, timeout=300)


def read_step_seconds(lab: Lab, run: str) -> float:
    """Return the mean time of the steps of `run`, after the first ones. The throughput in its metrics is the mean since its start."""
    lines = [json.loads(line) for line in (lab.shared_disk / run / "metrics.jsonl").read_text().splitlines()]
    tokens = _GLOBAL_BATCH * _SEQUENCE_LENGTH
    elapsed = {line["step"]: line["step"] * tokens / line["tokens_per_second"] for line in lines if "learning_rate" in line}
    return (elapsed[_STEPS] - elapsed[_WARMUP_STEPS]) / (_STEPS - _WARMUP_STEPS)
