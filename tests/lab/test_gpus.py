"""GPUs by default on real engines: those that engines declare, and those that the doctor finds, here by a simulated nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm_helpers import build_test_image, print_line, run_docker

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.launchers.swarm.machines import machine_records
from swarmtrain.launchers.swarm.machines.machine_records import LABEL_MACHINES
from swarmtrain.planning.plan import Plan, build_plan

ROOT = Path(__file__).parents[2]
# Lists as many GPUs as the file on the shared disk says, like nvidia-smi of a container that sees them.
NVIDIA_SMI = """#!/bin/sh
count=$(cat /workspace/runs/gpu-count)
number=0
while [ $number -lt $count ]; do
    case "$*" in
    -L) echo "GPU $number: NVIDIA H100 (UUID: GPU-$number)" ;;
    *driver_version*) echo "GPU-$number, NVIDIA H100, 580.65.06" ;;
    *) exit 2 ;;
    esac
    number=$((number + 1))
done
"""


def build_runner(image: str, **settings: Any) -> dict[str, Any]:
    return {"hosts": ["node0"], "stop_grace": 5, "docker_config": {"docker_container": image}, **settings}


def plan_run(launcher: SwarmLauncher, image: str, **settings: Any) -> Plan:
    config = Config.model_validate({"runner": build_runner(image, **settings)})
    cargo = Cargo((RunFile.from_content("training_code.py", b"train()\n"),))
    return build_plan(config, launcher.read_inventory(config.runner), cargo, run="demo")


@pytest.mark.test_all_only("starts a lab of its own; the resolved modes are in tests/unit/test_gpu_resolution.py")
def test_declared_gpus_are_reserved_without_a_setting(create_lab: Callable[[str], Lab], stub_image: str) -> None:
    lab = create_lab("declared")
    lab.bring_up(1, gpus=2, report_progress=print_line)
    launcher = SwarmLauncher(lab.get_docker_host("node0"))
    plan = plan_run(launcher, stub_image)
    assert "gpu: reserve (the hosts declare NVIDIA-GPU)" in str(plan)
    launcher.deploy_run(plan, print_line)
    assert [task.gpus for task in launcher.list_tasks("demo") if task.node == "node0"] == [("GPU-node0-1", "GPU-node0-2")]
    # Scaling uses the mode of the deployed run, which its config contains.
    assert launcher.load_deployment("demo")[0].runner.swarm.gpu == "reserve"
    assert plan_run(launcher, stub_image, swarm={"gpu": GpuMode.none}).world_size == 1
    container = run_docker(lab, "ps", "-q", "--filter", "name=demo_node0").strip()
    environment = run_docker(lab, "exec", container, "cat", "/proc/1/environ").split("\0")
    assert {"SWARMTRAIN_GPUS=2+", "SWARMTRAIN_SIMULATED_GPUS=2"} <= set(environment)
    launcher.tear_down_run("demo", print_line)
    lab.tear_down(report_progress=print_line)


def remove_probed_gpus(engine: DockerEngine) -> None:
    for item in engine.list_objects("/configs", label=f"{LABEL_MACHINES}=gpus"):
        engine.delete(f"/configs/{item['ID']}")


@pytest.fixture
def forget_gpus(engine: DockerEngine) -> Iterator[None]:
    """Remove what probes have stored: those of earlier tests before the test, and that of the test after it."""
    remove_probed_gpus(engine)
    yield
    remove_probed_gpus(engine)


def test_probed_gpus_are_kept_in_the_swarm(lab: Lab, engine: DockerEngine, stub_image: str, forget_gpus: None) -> None:
    ids = {node["Description"]["Hostname"]: node["ID"] for node in engine.list_objects("/nodes")}
    assert machine_records.read_gpu_counts(engine) == {}
    machine_records.record_gpus(engine, {ids["node0"]: ["GPU-1", "GPU-2"], ids["node1"]: [], "of a node that has left": ["GPU-9"]})
    machine_records.record_gpus(engine, {ids["node2"]: ["GPU-3"]})
    assert machine_records.read_gpu_counts(engine) == {ids["node0"]: 2, ids["node1"]: 0, ids["node2"]: 1}
    [stored] = engine.list_objects("/configs", label=f"{LABEL_MACHINES}=gpus")
    machine_records.record_gpus(engine, {ids["node2"]: ["GPU-3"]})
    assert engine.list_objects("/configs", label=f"{LABEL_MACHINES}=gpus") == [stored]  # nothing has changed
    # An object that cannot be read, for example of a later version, does not hide the others.
    broken = {"Name": "swarmtrain-machines-broken", "Labels": {LABEL_MACHINES: "gpus"}, "Data": "AAAA"}
    engine.post("/configs/create", broken)
    launcher = SwarmLauncher(lab.get_docker_host("node0"))
    assert "gpu: visible (the hosts have GPUs)" in str(plan_run(launcher, stub_image))
    plan = plan_run(launcher, stub_image, hosts=None, nodes=2)
    assert [(node.host, node.slots) for node in plan.nodes] == [("node0", 2), ("node2", 1)]
    assert "gpu: none (node0 has GPUs, but not node1)" in str(plan_run(launcher, stub_image, hosts=["node0", "node1"]))


@pytest.mark.test_all_only("starts a probe and two runs; the parts are in tests/entrypoint/test_gpu_count.py and tests/trainer")
def test_the_doctor_finds_gpus_which_the_next_run_uses_or_fails(
    lab: Lab, engine: DockerEngine, image: str, tmp_path: Path, forget_gpus: None
) -> None:
    tag = f"{REGISTRY_ADDRESS}/simulated-gpus:test"
    dockerfile = f"FROM {image}\nUSER root\nCOPY nvidia-smi /usr/bin/nvidia-smi\nRUN chmod 755 /usr/bin/nvidia-smi\nUSER trainer\n"
    build_test_image(engine, tag, {"Dockerfile": dockerfile, "nvidia-smi": NVIDIA_SMI})
    count_file = lab.shared_disk / "gpu-count"
    count_file.write_text("2")
    environment = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0")}
    mounts = [[str(lab.shared_disk), "/workspace/runs"]]
    runner = build_runner(tag, docker_config={"docker_container": tag, "docker_mounts": mounts})
    (tmp_path / "config.json").write_text(json.dumps({"runner": runner, "trainer": {"save_dir": "runs/demo"}}))
    script = "import swarmtrain.trainer\nwith swarmtrain.trainer.run() as run:\n    print('trains on', run.device)\n"
    (tmp_path / "training_code.py").write_text(script)

    def run_swarmtrain(*argv: str) -> str:
        command = [sys.executable, "-m", "swarmtrain", *argv]
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        print_line(done.stdout + done.stderr)
        return done.stdout + done.stderr

    try:
        assert "gpu: none (no host is known to have GPUs" in run_swarmtrain("plan", "config.json")
        assert "node0 on node0: has 2 GPUs, but the run uses none (gpu: none)" in run_swarmtrain("doctor", "config.json")
        planned = run_swarmtrain("plan", "config.json")
        assert "gpu: visible (the hosts have GPUs)" in planned
        assert "node0  node0  2      entry 1 of hosts; one slot per GPU, as last probed" in planned
        deployed = run_swarmtrain("deploy", "config.json", "--name", "demo")
        assert "the run uses GPUs, but torch cannot use CUDA: " in deployed
        assert "trains on" not in deployed
        run_swarmtrain("down", "demo")
        count_file.write_text("1")
        deployed = run_swarmtrain("deploy", "config.json", "--name", "demo")
        assert "finds 1 GPU, but the slots of the plan assume 2: run swarmtrain doctor CONFIG" in deployed
    finally:
        run_swarmtrain("down", "demo")
        count_file.unlink()
