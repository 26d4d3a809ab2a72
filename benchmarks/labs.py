"""A lab for as long as a benchmark needs one, and how long it takes to bring one up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.measure import SWARMTRAIN, Row, in_turns, say, until
from swarmtrain import process
from swarmtrain.lab import Lab

_RUNS = 3
_NODES = 4


@contextmanager
def lab(nodes: int, parts: Sequence[str] = ("swarm",)) -> Iterator[Lab]:
    """Give a lab of this process alone, and remove it however the body ends. Raises LabError where there can be none."""
    made = Lab(f"bench-{os.getpid()}")
    made.check(parts=parts)
    try:
        made.up(nodes, parts=parts, say=say)
        yield made
    finally:
        made.down(say=say)


def lab_up() -> Iterator[Row]:
    """Four engines, a swarm of them, and a registry, against the swarm made by hand, command after command."""
    made = Lab(f"bench-{os.getpid()}")
    made.check()

    def ours() -> float:
        return _timed(made, lambda: process.run([*SWARMTRAIN, "lab", "up", "--name", made.name, "--nodes", str(_NODES)]))

    def by_hand() -> float:
        return _timed(made, lambda: _by_hand(made))

    mine, theirs = in_turns(_RUNS, ours, by_hand)
    other_is = "the same engines bare, then `docker swarm init` and three times `docker swarm join` by hand"
    what = "`swarmtrain lab up --nodes 4`: four engines up and joined, and a registry"
    yield Row("lab-up-4", what, "s", mine, theirs, other_is, limit=5)


def _timed(made: Lab, up: Callable[[], object]) -> float:
    begun = time.monotonic()
    try:
        up()
        return time.monotonic() - begun
    finally:
        made.down(keep_images=True, say=lambda line: None)


def _by_hand(made: Lab) -> None:
    process.run([*SWARMTRAIN, "lab", "up", "--bare", "--name", made.name, "--nodes", str(_NODES)])
    addresses = {node.node: node.address for node in made.status()}
    first, *others = addresses
    docker = {node: ["docker", "-H", made.docker_host(node)] for node in addresses}
    process.run([*docker[first], "swarm", "init", "--advertise-addr", addresses[first]])
    token = process.run([*docker[first], "swarm", "join-token", "-q", "worker"]).strip()
    for node in others:
        process.run([*docker[node], "swarm", "join", "--token", token, f"{addresses[first]}:2377"])
    ready = [*docker[first], "node", "ls", "--format", "{{.Status}}"]
    until(lambda: process.run(ready).split() == ["Ready"] * _NODES, "the nodes are not ready", seconds=60, every=0.1)
