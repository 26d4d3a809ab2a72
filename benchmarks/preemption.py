"""Benchmark of preemption: a run of a high priority is submitted to a full cluster, with swarmtrain's queue and with Slurm."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.lab_startup import run_lab
from benchmarks.measurement import BUILD, ROOT, SWARMTRAIN_ARGV, BenchmarkRow, Sample, measure_in_turns, print_progress, wait_until
from benchmarks.run_startup import IMAGE, provide_image
from swarmtrain import process
from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.queueing import queue_service

_REPEATS, _NODE_COUNT = 3, 4
_VICTIM, _URGENT = "victim", "urgent"
_STEPS_BEFORE = 100
"""Step of the victim at which the urgent run is submitted. It has no checkpoint before."""
_MAX_SECONDS, _MAX_SECONDS_AFTER_SAVE = 45.0, 20.0
_STATE_FOLDER = BUILD / "preemption"
"""Runs and checkpoints of the Slurm jobs, which run on this machine's file system, as on a cluster with a shared home."""
_OPTIONS = [
    f"runner.nodes={_NODE_COUNT}",
    f"runner.min_nodes={_NODE_COUNT}",
    "runner.stop_grace=20",
    "trainer.train_iterations=100000",
    "trainer.save_interval=100000",
    "trainer.eval_interval=null",
]
_OWN_OPTIONS = {
    "swarm": {_VICTIM: "runner.priority=low", _URGENT: "runner.priority=high"},
    "slurm": {_VICTIM: "runner.slurm.partition=main", _URGENT: "runner.slurm.partition=urgent"},
}


@dataclass(frozen=True)
class _Preemption:
    """Times of one preemption, in seconds, and the steps that its victim lost."""

    submission_to_first_step: float
    save_to_first_step: float
    lost_steps: int


def measure_preemption() -> Iterator[BenchmarkRow]:
    """Measure the seconds from the submission of an urgent run to its first step, and what its victim loses."""
    measured: dict[str, list[_Preemption]] = {"swarm": [], "slurm": []}

    def measure(lab: Lab, runner_type: str) -> float:
        preemption = _measure_preemption(lab, runner_type)
        measured[runner_type].append(preemption)
        print_progress(f"{runner_type}: {preemption}")
        return preemption.submission_to_first_step

    with run_lab(_NODE_COUNT, components=("swarm", "slurm")) as lab:
        provide_image(lab)
        queue_service.start_scheduler(DockerEngine(lab.get_docker_host("node0")), IMAGE, print_progress)
        turns = [partial(measure, lab, runner_type) for runner_type in measured]
        result, baseline = measure_in_turns(_REPEATS, *turns, warm_up=False)
    description = (
        f"`swarmtrain deploy` of a run of a high priority on {_NODE_COUNT} nodes in use, until its first step: the victim saves first"
    )
    other = "the same runs under Slurm with `PreemptMode=REQUEUE`, without containers"
    yield BenchmarkRow("preemption", description, "s", result, baseline, other, limit=_MAX_SECONDS)
    samples = {name: Sample.from_values([each.save_to_first_step for each in items]) for name, items in measured.items()}
    description = "the same, from the victim's checkpoint to the first step"
    yield BenchmarkRow("preemption/save", description, "s", samples["swarm"], samples["slurm"], other, limit=_MAX_SECONDS_AFTER_SAVE)
    samples = {name: Sample.from_values([float(each.lost_steps) for each in items]) for name, items in measured.items()}
    yield BenchmarkRow("preemption/lost", "steps that a victim loses", "steps", samples["swarm"], samples["slurm"], other, limit=0.0)


def _measure_preemption(lab: Lab, runner_type: str) -> _Preemption:
    environment = {**lab.build_client_environment(), "XDG_STATE_HOME": str(_STATE_FOLDER / "home"), "OMP_NUM_THREADS": "1"}
    folder = lab.shared_disk if runner_type == "swarm" else _STATE_FOLDER
    deployed: list[str] = []
    try:
        deployed.append(_deploy(runner_type, _VICTIM, environment))
        wait_until(lambda: _find_last_step(folder / _VICTIM) >= _STEPS_BEFORE, "the victim's steps", timeout=300, interval=0.1)
        started_at = time.time()
        deployed.append(_deploy(runner_type, _URGENT, environment))
        wait_until(lambda: _find_last_step(folder / _URGENT) > 0, "the first step", timeout=300, interval=0.05)
        first_step_at = time.time()
        checkpoint = max((folder / _VICTIM).glob("step-*"))
        saved_step, saved_at = int(checkpoint.name.partition("-")[2]), checkpoint.stat().st_mtime
        return _Preemption(first_step_at - started_at, first_step_at - saved_at, _find_last_step(folder / _VICTIM) - saved_step)
    finally:
        for run in reversed(deployed):
            process.run_command([*SWARMTRAIN_ARGV, "down", run, "--yes"], env=environment)
            shutil.rmtree(folder / run, ignore_errors=True)


def _deploy(runner_type: str, run: str, environment: dict[str, str]) -> str:
    """Submit a run, and return its name."""
    own = [_OWN_OPTIONS[runner_type][run]]
    if runner_type == "swarm":
        own += [f"runner.docker_config.docker_container={IMAGE}", f"trainer.save_dir=runs/{run}", f"logger.audit_dir=runs/{run}/audit"]
    else:
        save_folder, data = _STATE_FOLDER / run, _STATE_FOLDER / "data"
        own += ["runner.runner_type=slurm", "runner.slurm.cpus_per_node=8", f"trainer.save_dir={save_folder}"]
        own += [f"logger.audit_dir={save_folder}/audit", f"data.data_prefixes=[{data}/train]"]
        own += [f"data.validation_data_prefixes=[{data}/validation]"]
    options = [part for option in [*_OPTIONS, *own] for part in ("-o", option)]
    process.run_command(
        [*SWARMTRAIN_ARGV, "deploy", "examples/quickstart.yml", "--name", run, "--detach", *options], cwd=ROOT, env=environment
    )
    return run


def _find_last_step(folder: Path) -> int:
    """Return the last step that a rank has completed, by its audit log; 0 if none."""
    steps = [0]
    for file in (folder / "audit").glob("world-*-rank-*.jsonl"):
        lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        steps += [int(json.loads(lines[-1])["step"])] if lines else []
    return max(steps)
