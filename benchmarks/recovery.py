"""What a death and a change of size cost a run: seconds until it goes on, beside plain torchrun's."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml

from benchmarks.labs import lab
from benchmarks.measure import BUILD, SWARMTRAIN, Row, in_turns, say, until
from benchmarks.runs import OPTIONS, RUN, distribute
from swarmtrain import process
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher

_RUNS = 2
_SCALED = 3
_NODES = 4
_STEADY = 15
"""Steps after which a world is taken to run as it does."""
_AUDIT = f"{RUN}-audit"
_STACK = BUILD / "recovery.yml"
_CONFIG = [
    *OPTIONS,
    *("-o", f"logger.audit_dir=runs/{_AUDIT}"),
    *("-o", "trainer.train_iterations=100000"),
    *("-o", "trainer.save_interval=50"),
    *("-o", "trainer.eval_interval=null"),
    *("-o", "transformer_architecture.hidden_size=64"),
    *("-o", f"runner.max_nodes={_NODES}"),
]
_TORCHRUN = ["torchrun", f"--nnodes={_NODES}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400"]
_RESTARTS = ["--rdzv-id=bench", "--max-restarts=1000", "training_code.py"]


def killed_container() -> Iterator[Row]:
    """SIGKILL for a node's container, until the run makes a step that it had not made before."""
    with lab(_NODES) as place:
        distribute(place)

        def ours() -> float:
            with _run(place, _NODES):
                return _killed(place)

        def plain() -> float:
            with _plain_run(place):
                return _killed(place)

        mine, theirs = in_turns(_RUNS, ours, plain, warm_up=False)
    what = f"a container of {_NODES} is killed, to the first step that had not been made before; steps of 0.1 s, a checkpoint every 50"
    other_is = f"`torchrun --nnodes={_NODES}` in the same containers, of the same trainer, from its newest checkpoint"
    yield Row("recovery", what, "s", mine, theirs, other_is, limit=15)


def planned_scale() -> Iterator[Row]:
    """`swarmtrain scale` from two nodes to four, to the first step of four ranks."""
    with lab(_NODES) as place:
        distribute(place)

        def ours() -> float:
            with _run(place, 2):
                begun = time.monotonic()
                process.run([*SWARMTRAIN, "scale", RUN, "--nodes", str(_NODES), "--yes"], env=place.env())
                until(lambda: _ranks(place) == _NODES, "four ranks make no step", every=0.1)
                return time.monotonic() - begun

        [mine] = in_turns(_SCALED, ours, warm_up=False)
    what = f"`swarmtrain scale --nodes {_NODES}` of a run of 2 nodes, to the first step of {_NODES} ranks; no step is made twice"
    yield Row("scale", what, "s", mine, note="12 s are wished for: two containers import torch while two ranks keep both cores busy")


def _killed(place: Lab) -> float:
    """Kill a container, and return the seconds until a step is made that was not made before."""
    docker = ["docker", "-H", place.docker_host("node2")]
    [container] = process.run([*docker, "ps", "-q", "--filter", f"name={RUN}_node2"]).split()
    process.run([*docker, "kill", "--signal", "KILL", container])
    begun, worlds = time.monotonic(), _worlds(place)
    before = _step(place)
    until(lambda: _worlds(place) > worlds and _step(place) > before, "training does not go on", seconds=150, every=0.1)
    seconds = time.monotonic() - begun
    say(f"{seconds:.1f} s")
    return seconds


@contextmanager
def _run(place: Lab, nodes: int) -> Iterator[None]:
    """Have ours running on so many nodes, in a steady state."""
    environment = place.env()
    command = ["deploy", "examples/quickstart.yml", "--name", RUN, "--detach", *_CONFIG, "-o", f"runner.nodes={nodes}"]
    try:
        process.run([*SWARMTRAIN, *command], env=environment)
        _settle(place, nodes)
        yield
    finally:
        SwarmLauncher(environment["DOCKER_HOST"]).down(RUN, lambda line: None)
        _clear(place)


@contextmanager
def _plain_run(place: Lab) -> Iterator[None]:
    """Have the same containers run the same script under torchrun, in a steady state."""
    environment = place.env()
    options = [*_CONFIG, "-o", f"runner.nodes={_NODES}"]
    process.run([*SWARMTRAIN, "generate", "examples/quickstart.yml", *options, "--name", RUN, "--output", str(_STACK)], env=environment)
    _STACK.write_text(yaml.safe_dump(_without_us(yaml.safe_load(_STACK.read_text()))))
    try:
        process.run(["docker", "stack", "deploy", "--detach=true", "-c", str(_STACK), RUN], env=environment)
        _settle(place, _NODES)
        yield
    finally:
        process.run(["docker", "stack", "rm", RUN], env=environment)
        listed = ["docker", "network", "ls", "-q", "--filter", f"name={RUN}_"]
        until(lambda: not process.run(listed, env=environment).strip(), "the stack's network stays")
        _clear(place)


def _without_us(stack: dict[str, Any]) -> dict[str, Any]:
    """Let torchrun start the script, without a notice board and without our supervisor."""
    del stack["services"]["rendezvous"]
    for name, service in stack["services"].items():
        # By its own host name, a container's id, a node that was started again would not be found.
        service["entrypoint"] = [*_TORCHRUN, f"--local-addr={name}", *_RESTARTS]
        del service["command"]
        environment = service["environment"]
        service["environment"] = {key: value for key, value in environment.items() if key in ("SWARMTRAIN_CONFIG", "OMP_NUM_THREADS")}
    return stack


def _settle(place: Lab, ranks: int) -> None:
    until(lambda: _ranks(place) == ranks, f"{ranks} ranks make no steps", seconds=300)
    step = _step(place)
    until(lambda: _step(place) >= step + _STEADY, "no steps are made", seconds=300)


def _worlds(place: Lab) -> int:
    """Return the token of the newest world that has made a step."""
    return max((token for token, _ in _audited(place)), default=0)


def _ranks(place: Lab) -> int:
    """Return how many ranks of the newest world have made a step."""
    newest = _worlds(place)
    return sum(token == newest for token, _ in _audited(place))


def _step(place: Lab) -> int:
    """Return the highest step that any rank has made."""
    return max((step for _, step in _audited(place)), default=0)


def _audited(place: Lab) -> Sequence[tuple[int, int]]:
    """Return token and newest step of each rank of each world, as it has written them down."""
    found = []
    for file in (place.shared / _AUDIT).glob("world-*-rank-*.jsonl"):
        whole = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        if whole:
            said = json.loads(whole[-1])
            found.append((int(said["token"]), int(said["step"])))
    return found


def _clear(place: Lab) -> None:
    for folder in place.shared.glob(f"{RUN}*"):
        shutil.rmtree(folder)
