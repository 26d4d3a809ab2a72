"""The time per step that `plan` estimates from what doctor has measured over slow links."""

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
from swarmtrain.launchers.swarm.machines.machine_records import read_measurements

pytestmark = pytest.mark.test_all_only("trains over slow links; tests/unit has the formulas")

_STEPS, _WARMUP_STEPS = 12, 3
_GLOBAL_BATCH, _SEQUENCE_LENGTH = 12, 128
_RUN = "estimated"
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


def test_plan_estimates_a_step_from_what_doctor_has_measured(two_nodes: Lab, image: str) -> None:
    """Over links of 100 Mbit/s most of a step of ddp is the network. `make bench ONLY=estimates` measures how near the estimates are."""
    lab = two_nodes
    for node in ("node0", "node1"):
        lab.limit_node_bandwidth(node, "100mbit", report_progress=print_line)
    options = build_options(image, _RUN, *_SETTINGS)
    run_swarmtrain(lab, "doctor", "examples/quickstart.yml", "--step-times", "--name", _RUN, *options)
    plan = json.loads(run_swarmtrain(lab, "plan", "examples/quickstart.yml", "--json", "--name", _RUN, *options))
    estimates = plan["step_estimates"]
    configured = estimates["rows"][0]
    assert configured["name"] == "ddp"
    assert configured["network_seconds"] > configured["seconds"] / 2
    assert "diloco" in estimates["recommended"]
    run_swarmtrain(lab, "deploy", "examples/quickstart.yml", "--name", _RUN, *options)
    measured = read_step_seconds(lab, _RUN)
    run_swarmtrain(lab, "down", _RUN, "--yes")
    print_line(f"estimated {configured['seconds']:.3f} s, measured {measured:.3f} s")
    assert 0.5 < configured["seconds"] / measured < 2, "other suites may use the machine meanwhile"
    assert len(read_measurements(SwarmLauncher(lab.get_docker_host("node0"))._engine)) == 1


def run_swarmtrain(lab: Lab, *argv: str) -> str:
    environment = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0")}
    return process.run_command([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT, env=environment, timeout=300)


def read_step_seconds(lab: Lab, run: str) -> float:
    """Return the mean time of the steps of `run`, after the first ones. The throughput in its metrics is the mean since its start."""
    lines = [json.loads(line) for line in (lab.shared_disk / run / "metrics.jsonl").read_text().splitlines()]
    tokens = _GLOBAL_BATCH * _SEQUENCE_LENGTH
    elapsed = {line["step"]: line["step"] * tokens / line["tokens_per_second"] for line in lines if "learning_rate" in line}
    return (elapsed[_STEPS] - elapsed[_WARMUP_STEPS]) / (_STEPS - _WARMUP_STEPS)
