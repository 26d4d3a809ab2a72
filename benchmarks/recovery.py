"""Benchmarks of recovery and scaling: seconds until the run completes a new step, with swarmtrain and plain torchrun."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml

from benchmarks.lab_startup import run_lab
from benchmarks.measurement import BUILD, SWARMTRAIN_ARGV, BenchmarkRow, measure_in_turns, print_progress, wait_until
from benchmarks.run_startup import DEPLOY_OPTIONS, RUN_NAME, provide_image
from swarmtrain import process
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher

_REPEATS = 2
_SCALE_REPEATS = 3
_NODE_COUNT = 4
_STEADY_STEPS = 15
"""Number of steps after which a world is in a steady state."""
_AUDIT_FOLDER_NAME = f"{RUN_NAME}-audit"
_STACK_FILE = BUILD / "recovery.yml"
_DEPLOY_OPTIONS = [
    *DEPLOY_OPTIONS,
    *("-o", f"logger.audit_dir=runs/{_AUDIT_FOLDER_NAME}"),
    *("-o", "trainer.train_iterations=100000"),
    *("-o", "trainer.save_interval=50"),
    *("-o", "trainer.eval_interval=null"),
    *("-o", "transformer_architecture.hidden_size=64"),
    *("-o", f"runner.max_nodes={_NODE_COUNT}"),
]
_TORCHRUN_COMMAND = ["torchrun", f"--nnodes={_NODE_COUNT}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400"]
_TORCHRUN_RESTART_OPTIONS = ["--rdzv-id=bench", "--max-restarts=1000", "training_code.py"]


def measure_recovery() -> Iterator[BenchmarkRow]:
    """Measure the time, in seconds, from SIGKILL of a node's container to the first new step of the run."""
    with run_lab(_NODE_COUNT) as lab:
        provide_image(lab)

        def measure_swarmtrain() -> float:
            with _run_swarmtrain(lab, _NODE_COUNT):
                return _measure_recovery_seconds(lab)

        def measure_torchrun() -> float:
            with _run_torchrun(lab):
                return _measure_recovery_seconds(lab)

        result, baseline = measure_in_turns(_REPEATS, measure_swarmtrain, measure_torchrun, warm_up=False)
    description = f"one of {_NODE_COUNT} containers is killed, until the first new step; steps of 0.1 s, a checkpoint every 50 steps"
    baseline_description = (
        f"`torchrun --nnodes={_NODE_COUNT}` in the same containers with the same trainer, resumed from its newest checkpoint"
    )
    yield BenchmarkRow("recovery", description, "s", result, baseline, baseline_description, limit=15)


def measure_scaling_time() -> Iterator[BenchmarkRow]:
    """Measure the time, in seconds, from `swarmtrain scale` (2 nodes to 4) to the first step of four ranks."""
    with run_lab(_NODE_COUNT) as lab:
        provide_image(lab)

        def measure_swarmtrain() -> float:
            with _run_swarmtrain(lab, 2):
                started_at = time.monotonic()
                process.run_command(
                    [*SWARMTRAIN_ARGV, "scale", RUN_NAME, "--nodes", str(_NODE_COUNT), "--yes"], env=lab.build_client_environment()
                )
                wait_until(lambda: _count_ranks(lab) == _NODE_COUNT, "the first step of four ranks", interval=0.1)
                return time.monotonic() - started_at

        [result] = measure_in_turns(_SCALE_REPEATS, measure_swarmtrain, warm_up=False)
    description = (
        f"`swarmtrain scale --nodes {_NODE_COUNT}` of a run of 2 nodes, until the first step of {_NODE_COUNT} ranks; no step is recomputed"
    )
    yield BenchmarkRow(
        "scale", description, "s", result, note="goal: 12 s; two containers import torch while two ranks keep both cores busy"
    )


def _measure_recovery_seconds(lab: Lab) -> float:
    """Kill a container, and return the seconds to the first step that had not been computed before."""
    docker = ["docker", "-H", lab.get_docker_host("node2")]
    [container] = process.run_command([*docker, "ps", "-q", "--filter", f"name={RUN_NAME}_node2"]).split()
    process.run_command([*docker, "kill", "--signal", "KILL", container])
    killed_at, generation = time.monotonic(), _find_newest_generation(lab)
    highest_step = _find_highest_step(lab)
    wait_until(
        lambda: _find_newest_generation(lab) > generation and _find_highest_step(lab) > highest_step,
        "the first new step",
        timeout=150,
        interval=0.1,
    )
    seconds = time.monotonic() - killed_at
    print_progress(f"{seconds:.1f} s")
    return seconds


@contextmanager
def _run_swarmtrain(lab: Lab, nodes: int) -> Iterator[None]:
    """Run swarmtrain on `nodes` nodes during the body, which starts once the run is in a steady state."""
    environment = lab.build_client_environment()
    command = ["deploy", "examples/quickstart.yml", "--name", RUN_NAME, "--detach", *_DEPLOY_OPTIONS, "-o", f"runner.nodes={nodes}"]
    try:
        process.run_command([*SWARMTRAIN_ARGV, *command], env=environment)
        _wait_for_steady_state(lab, nodes)
        yield
    finally:
        SwarmLauncher(environment["DOCKER_HOST"]).tear_down_run(RUN_NAME, lambda line: None)
        _remove_run_folders(lab)


@contextmanager
def _run_torchrun(lab: Lab) -> Iterator[None]:
    """Run the same script in the same containers under torchrun during the body, which starts in a steady state."""
    environment = lab.build_client_environment()
    options = [*_DEPLOY_OPTIONS, "-o", f"runner.nodes={_NODE_COUNT}"]
    process.run_command(
        [*SWARMTRAIN_ARGV, "generate", "examples/quickstart.yml", *options, "--name", RUN_NAME, "--output", str(_STACK_FILE)],
        env=environment,
    )
    _STACK_FILE.write_text(yaml.safe_dump(_replace_supervisor_with_torchrun(yaml.safe_load(_STACK_FILE.read_text()))))
    try:
        process.run_command(["docker", "stack", "deploy", "--detach=true", "-c", str(_STACK_FILE), RUN_NAME], env=environment)
        _wait_for_steady_state(lab, _NODE_COUNT)
        yield
    finally:
        process.run_command(["docker", "stack", "rm", RUN_NAME], env=environment)
        list_command = ["docker", "network", "ls", "-q", "--filter", f"name={RUN_NAME}_"]
        wait_until(lambda: not process.run_command(list_command, env=environment).strip(), "the removal of the stack's network")
        _remove_run_folders(lab)


def _replace_supervisor_with_torchrun(stack: dict[str, Any]) -> dict[str, Any]:
    """Return `stack` with torchrun as the launcher of the script, without coordinator and supervisor."""
    del stack["services"]["rendezvous"]
    for name, service in stack["services"].items():
        # The default local address, the host name, is the container's id: other nodes could not resolve it after a restart.
        service["entrypoint"] = [*_TORCHRUN_COMMAND, f"--local-addr={name}", *_TORCHRUN_RESTART_OPTIONS]
        del service["command"]
        environment = service["environment"]
        service["environment"] = {key: value for key, value in environment.items() if key in ("SWARMTRAIN_CONFIG", "OMP_NUM_THREADS")}
    return stack


def _wait_for_steady_state(lab: Lab, ranks: int) -> None:
    wait_until(lambda: _count_ranks(lab) == ranks, f"the first step of {ranks} ranks", timeout=300)
    step = _find_highest_step(lab)
    wait_until(lambda: _find_highest_step(lab) >= step + _STEADY_STEPS, "the steady state", timeout=300)


def _find_newest_generation(lab: Lab) -> int:
    """Return the generation of the newest world that has completed a step."""
    return max((generation for generation, _ in _read_audit(lab)), default=0)


def _count_ranks(lab: Lab) -> int:
    """Return how many ranks of the newest world have completed a step."""
    newest_generation = _find_newest_generation(lab)
    return sum(generation == newest_generation for generation, _ in _read_audit(lab))


def _find_highest_step(lab: Lab) -> int:
    """Return the highest step that any rank has completed."""
    return max((step for _, step in _read_audit(lab)), default=0)


def _read_audit(lab: Lab) -> Sequence[tuple[int, int]]:
    """Return the generation and the newest step of each rank of each world, read from the audit logs."""
    newest_steps = []
    for file in (lab.shared_disk / _AUDIT_FOLDER_NAME).glob("world-*-rank-*.jsonl"):
        complete_lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        if complete_lines:
            newest_record = json.loads(complete_lines[-1])
            newest_steps.append((int(newest_record["generation"]), int(newest_record["step"])))
    return newest_steps


def _remove_run_folders(lab: Lab) -> None:
    for folder in lab.shared_disk.glob(f"{RUN_NAME}*"):
        shutil.rmtree(folder)
