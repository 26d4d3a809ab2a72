"""A run of three nodes from the command to its first optimizer step, by swarmtrain and by plain Docker; a doctor's look at four."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from benchmarks.labs import lab
from benchmarks.measure import BUILD, ROOT, SWARMTRAIN, Row, in_turns, say, until, wall_seconds
from swarmtrain import images, process, wire
from swarmtrain.errors import RunNotFound
from swarmtrain.lab import REGISTRY, Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.wire import Event

_RUNS = 3
RUN = "bench"
_IMAGE = f"{REGISTRY}/swarmtrain:bench"
OPTIONS = ["-o", f"runner.docker_config.docker_container={_IMAGE}", "-o", f"trainer.save_dir=runs/{RUN}"]
_STACK = BUILD / "run" / "generated.yml"


def first_step() -> Iterator[Row]:
    """The quickstart on a lab whose nodes have the image already."""
    with lab(3) as place:
        distribute(place)
        environment = place.env()
        launcher = SwarmLauncher(environment["DOCKER_HOST"])
        process.run([*SWARMTRAIN, "generate", "examples/quickstart.yml", *OPTIONS, "--name", RUN, "--output", str(_STACK)], env=environment)
        phases: dict[str, list[dict[str, float]]] = {"ours": [], "docker's": []}

        def ours() -> float:
            return measure("ours", [*SWARMTRAIN, "deploy", "examples/quickstart.yml", "--name", RUN, *OPTIONS])

        def dockers() -> float:
            return measure("docker's", ["docker", "stack", "deploy", "-c", str(_STACK), RUN])

        def measure(whose: str, argv: list[str]) -> float:
            begun = time.time()
            with _started(argv, environment):
                until(lambda: _has_stepped(launcher), "the first step", seconds=300)
                found = _phases(launcher, Engine(environment["DOCKER_HOST"]), begun)
            launcher.down(RUN, lambda line: None)
            process.run(["rm", "-rf", str(place.shared / RUN)])
            phases[whose].append(found)
            say(f"{whose}: {_told([found])}")
            return found["first step"]

        mine, theirs = in_turns(_RUNS, ours, dockers)
    note = "; ".join(f"{whose}, seconds after the command: {_told(found[1:])}" for whose, found in phases.items())
    what = "`swarmtrain deploy examples/quickstart.yml` to the first optimizer step: 3 nodes on one machine, image there"
    yield Row("first-step", what, "s", mine, theirs, "`docker stack deploy` of the file that `generate` writes", limit=25, note=note)


def doctor() -> Iterator[Row]:
    """All that doctor asks and probes, on a lab whose nodes have the image already."""
    with lab(4) as place:
        distribute(place)
        argv = [*SWARMTRAIN, "doctor", "examples/quickstart.yml", "-o", "runner.nodes=4", *OPTIONS]
        [ours] = in_turns(_RUNS, lambda: wall_seconds(argv, env=place.env()))
    what = "`swarmtrain doctor examples/quickstart.yml`: a probe of 4 nodes on one machine and all their links, image there"
    yield Row("doctor-4", what, "s", ours, limit=20)


def distribute(place: Lab) -> None:
    """Build the image and have every node pull it."""
    engine = Engine(place.docker_host("node0"), timeout=600)
    images.build(engine.client, ROOT, _IMAGE, say=lambda line: None)
    say("pushing the image")
    images.push(engine.client, _IMAGE, say=lambda line: None)
    pinned = images.pin(engine, _IMAGE).reference
    say("pulling it on every node")
    with ThreadPoolExecutor() as pool:
        engines = [Engine(place.docker_host(node.node), timeout=600) for node in place.status()]
        list(pool.map(lambda each: each.client.pull(pinned), engines))


@contextmanager
def _started(argv: list[str], environment: dict[str, str]) -> Iterator[None]:
    program = process.start(argv, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        program.terminate()
        program.wait()


def _has_stepped(launcher: SwarmLauncher) -> bool:
    try:
        return any(event.kind == wire.PROGRESS for event in launcher.events(RUN))
    except RunNotFound:
        return False


def _phases(launcher: SwarmLauncher, engine: Engine, begun: float) -> dict[str, float]:
    """Return how many seconds after `begun` each thing had happened, by the clocks of whom it happened to, which are one."""
    events = launcher.events(RUN)
    label = f"{wire.LABEL_STACK}={RUN}"
    created = max(_seconds(service["CreatedAt"]) for service in engine.listing("/services", label=label))
    running = max(_seconds(task["Status"]["Timestamp"]) for task in engine.listing("/tasks", label=label))
    moments = {
        "services made": created,
        "containers running": running,
        "board up": _moment(events, wire.BOARD_UP, min),
        "nodes joined": _moment(events, wire.JOINED, max),
        "world formed": _moment(events, wire.WORLD, min),
        "held-out loss": _moment(events, wire.EVALUATION, min),
        "first step": _moment(events, wire.PROGRESS, min),
    }
    return {name: moment - begun for name, moment in moments.items()}


def _moment(events: list[Event], kind: str, which: Callable[[Iterator[float]], float]) -> float:
    return which(event.time for event in events if event.kind == kind)


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _told(found: list[dict[str, Any]]) -> str:
    return ", ".join(f"{name} {statistics.median(each[name] for each in found):.1f}" for name in found[0])
