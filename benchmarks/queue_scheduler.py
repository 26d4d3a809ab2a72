"""Benchmarks of the queue's scheduler: one decision for a full cluster, and its CPU time while nothing happens."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.idle_services import IMAGE, build_small_run, provide_image
from benchmarks.lab_startup import run_lab
from benchmarks.measurement import ROOT, BenchmarkRow, Sample, print_progress
from swarmtrain import process
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import build_plan
from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing import queue_service
from swarmtrain.queueing.decisions.admission import decide
from swarmtrain.queueing.decisions.queue_model import Allocation, MachineSupply, QueuedRun, QueueSnapshot

_MACHINES, _QUEUED_RUNS, _REPEATS = 50, 200, 9
_GPUS_PER_MACHINE = 8
_MAX_DECISION_SECONDS = 1.0
_PRIORITIES = (-100, 0, 100)
_KNOWN_RUNS, _NODE_COUNT = 100, 4
_WARM_UP_SECONDS, _IDLE_SECONDS, _IDLE_REPEATS = 20.0, 30.0, 3
_MAX_IDLE_PERCENT = 1.0
_SCHEDULER_SCRIPT = """
import sys, threading
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.queueing.scheduler import Scheduler
from swarmtrain.queueing.__main__ import watch_swarm
wake, engine = threading.Event(), DockerEngine(sys.argv[1])
watch_swarm(engine, wake)
Scheduler(engine, print).run_forever(wake)
"""


def measure_scheduler() -> Iterator[BenchmarkRow]:
    """Measure a decision, and the CPU time of a scheduler that has nothing to decide."""
    yield from _measure_decision()
    yield from _measure_idle_scheduler()


def _measure_decision() -> Iterator[BenchmarkRow]:
    """Measure the seconds of one decision: 200 queued runs of three priorities, 50 machines that are all in use."""
    durations = []
    for repeat in range(_REPEATS):
        snapshot = _build_snapshot(repeat)
        ends = {run.run: run.time_limit for run in snapshot.runs if run.time_limit is not None and run.allocated}
        started_at = time.perf_counter()
        decide(snapshot, ends)
        durations.append(time.perf_counter() - started_at)
    yield BenchmarkRow(
        "queue/decision",
        f"a decision of the queue's scheduler, {_QUEUED_RUNS} queued runs on {_MACHINES} machines in use",
        "s",
        Sample.from_values(durations),
        limit=_MAX_DECISION_SECONDS,
    )


def _measure_idle_scheduler() -> Iterator[BenchmarkRow]:
    """Measure the CPU time of the scheduler, in percent of a core, while 100 runs are known: one on each machine, and the others wait."""
    with run_lab(_NODE_COUNT) as lab:
        engine = DockerEngine(lab.get_docker_host("node0"))
        provide_image(engine)
        queue_service.start_scheduler(engine, IMAGE, print_progress)  # its program only waits: this process has the one that is measured
        launcher, (config, cargo) = SwarmLauncher(engine.address), build_small_run(1)
        for number in range(_KNOWN_RUNS):
            launcher.deploy_run(build_plan(config, launcher.read_inventory(config.runner), cargo, run=f"idle{number}"), lambda _line: None)
        print_progress(f"{_KNOWN_RUNS} runs are in the queue")
        scheduler = process.start_process(
            [sys.executable, "-c", _SCHEDULER_SCRIPT, engine.address], cwd=ROOT, stdout=subprocess.DEVNULL, die_with_parent=True
        )
        try:
            time.sleep(_WARM_UP_SECONDS)
            shares = [_measure_cpu_percent(scheduler.pid) for _ in range(_IDLE_REPEATS)]
        finally:
            scheduler.kill()
            scheduler.wait()
    description = f"CPU time of the queue's scheduler with {_KNOWN_RUNS} runs, {_KNOWN_RUNS - _NODE_COUNT} of which wait"
    yield BenchmarkRow("queue/idle", description, "% of a core", Sample.from_values(shares), limit=_MAX_IDLE_PERCENT)


def _measure_cpu_percent(pid: int) -> float:
    before, started_at = _read_cpu_seconds(pid), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return 100 * (_read_cpu_seconds(pid) - before) / (time.monotonic() - started_at)


def _read_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, user and system: fields 14 and 15 of proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _build_snapshot(seed: int) -> QueueSnapshot:
    """Return a random cluster: on each machine a run of a low or normal priority, and waiting runs of up to 16 nodes."""
    chosen = random.Random(seed)  # noqa: S311  # not for cryptography
    machines = tuple(
        MachineSupply(f"m{index}", f"gpu-{index}", {"NVIDIA-GPU": float(_GPUS_PER_MACHINE), "cores": 64.0}) for index in range(_MACHINES)
    )

    def build_run(name: str, position: int, gpus: int, nodes: int, allocated: frozenset[str]) -> QueuedRun:
        allocation = Allocation({"NVIDIA-GPU": float(gpus), "cores": 8.0 * gpus})
        return QueuedRun(
            run=name,
            owner=chosen.choice(("anna", "bert", "carla")),
            priority=chosen.choice(_PRIORITIES[:2] if allocated else _PRIORITIES),
            position=float(position),
            state=EntryState.admitted if allocated else EntryState.waiting,
            needs=dict.fromkeys((machine.id for machine in machines), allocation),
            min_nodes=chosen.randint(1, nodes),
            nodes=nodes,
            allocated=allocated,
            time_limit=chosen.choice((None, 3600.0, 7200.0)),
        )

    running = [build_run(f"running{index}", index, _GPUS_PER_MACHINE, 1, frozenset({machine.id})) for index, machine in enumerate(machines)]
    waiting = [
        build_run(f"waiting{index}", _MACHINES + index, chosen.choice((1, 2, 4, 8)), chosen.randint(1, 16), frozenset())
        for index in range(_QUEUED_RUNS)
    ]
    return QueueSnapshot(machines, (*running, *waiting))
