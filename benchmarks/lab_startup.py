"""A lab for the duration of a benchmark, and the time that it takes to bring one up."""

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
def running_lab(nodes: int, components: Sequence[str] = ("swarm",)) -> Iterator[Lab]:
    """Yield a lab that belongs to this process alone, and always remove it afterwards.

    Raises LabError if this machine cannot host one.
    """
    new_lab = Lab(f"bench-{os.getpid()}")
    new_lab.check_prerequisites(components=components)
    try:
        new_lab.bring_up(nodes, components=components, report_progress=print_progress)
        yield new_lab
    finally:
        new_lab.tear_down(report_progress=print_progress)


def measure_lab_up() -> Iterator[BenchmarkRow]:
    """Four engines in a swarm and a registry, against the same swarm made by hand, command by command."""
    lab = Lab(f"bench-{os.getpid()}")
    lab.check_prerequisites()

    def measure_swarmtrain() -> float:
        return _measure_start(
            lab, lambda: process.run_command([*SWARMTRAIN_ARGV, "lab", "up", "--name", lab.name, "--nodes", str(_NODE_COUNT)])
        )

    def measure_by_hand() -> float:
        return _measure_start(lab, lambda: _bring_up_by_hand(lab))

    result, baseline = measure_in_turns(_REPEATS, measure_swarmtrain, measure_by_hand)
    baseline_description = "bare engines, one `docker swarm init` and three `docker swarm join`"
    description = "`swarmtrain lab up --nodes 4`: four engines in a swarm, and a registry"
    yield BenchmarkRow("lab-up-4", description, "s", result, baseline, baseline_description, limit=5)


def _measure_start(lab: Lab, bring_up: Callable[[], object]) -> float:
    started_at = time.monotonic()
    try:
        bring_up()
        return time.monotonic() - started_at
    finally:
        lab.tear_down(keep_images=True, report_progress=lambda line: None)


def _bring_up_by_hand(lab: Lab) -> None:
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
        lambda: process.run_command(status_command).split() == ["Ready"] * _NODE_COUNT, "the nodes are not ready", seconds=60, interval=0.1
    )
