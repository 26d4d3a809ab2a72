"""Create a lab for the duration of a benchmark, and measure the time to start a lab."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.measurement import SWARMTRAIN_ARGV, BenchmarkRow, measure_in_turns, print_progress, wait_until
from swarmtrain import process
from swarmtrain.lab import Lab

_REPEATS = 3
_NODE_COUNT = 4


@contextmanager
def run_lab(nodes: int, components: Sequence[str] = ("swarm",)) -> Iterator[Lab]:
    """Start and yield a lab of `nodes` nodes that only this process uses, and remove it afterwards.

    Raises LabError if the lab cannot run on this machine.
    """
    new_lab = Lab(f"bench-{os.getpid()}")
    new_lab.check_prerequisites(components=components)
    try:
        new_lab.bring_up(nodes, components=components, report_progress=print_progress)
        yield new_lab
    finally:
        new_lab.tear_down(report_progress=print_progress)


def measure_lab_up() -> Iterator[BenchmarkRow]:
    """Measure the startup time, in seconds, of a lab: four engines in a swarm, and a registry.

    The baseline is the same swarm, created with Docker commands.
    """
    lab = Lab(f"bench-{os.getpid()}")
    lab.check_prerequisites()

    def measure_swarmtrain() -> float:
        return _measure_start(
            lab, lambda: process.run_command([*SWARMTRAIN_ARGV, "lab", "up", "--name", lab.name, "--nodes", str(_NODE_COUNT)])
        )

    def measure_by_hand() -> float:
        return _measure_start(lab, lambda: _start_swarm_with_docker(lab))

    result, baseline = measure_in_turns(_REPEATS, measure_swarmtrain, measure_by_hand)
    baseline_description = "bare engines, one `docker swarm init` and three `docker swarm join`"
    description = "`swarmtrain lab up --nodes 4`: four engines in a swarm, and a registry"
    yield BenchmarkRow("lab-up-4", description, "s", result, baseline, baseline_description, limit=5)


def _measure_start(lab: Lab, start_lab: Callable[[], object]) -> float:
    started_at = time.monotonic()
    try:
        start_lab()
        return time.monotonic() - started_at
    finally:
        lab.tear_down(keep_images=True, report_progress=lambda line: None)


def _start_swarm_with_docker(lab: Lab) -> None:
    process.run_command([*SWARMTRAIN_ARGV, "lab", "up", "--bare", "--name", lab.name, "--nodes", str(_NODE_COUNT)])
    addresses = {node.node: node.address for node in lab.get_status()}
    first, *others = addresses
    docker = {node: ["docker", "-H", lab.get_docker_host(node)] for node in addresses}
    process.run_command([*docker[first], "swarm", "init", "--advertise-addr", addresses[first]])
    token = process.run_command([*docker[first], "swarm", "join-token", "-q", "worker"]).strip()
    for node in others:
        process.run_command([*docker[node], "swarm", "join", "--token", token, f"{addresses[first]}:2377"])
    status_command = [*docker[first], "node", "ls", "--format", "{{.Status}}"]
    wait_until(
        lambda: process.run_command(status_command).split() == ["Ready"] * _NODE_COUNT, "the nodes are not ready", timeout=60, interval=0.1
    )
