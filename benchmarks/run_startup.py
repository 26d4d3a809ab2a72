"""Benchmarks of startup: time to the first optimizer step on three nodes, with swarmtrain and plain Docker; doctor on four nodes."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from benchmarks.lab_startup import run_lab
from benchmarks.measurement import (
    BUILD,
    ROOT,
    SWARMTRAIN_ARGV,
    BenchmarkRow,
    measure_in_turns,
    measure_wall_seconds,
    print_progress,
    wait_until,
)
from swarmtrain import images, process, protocol
from swarmtrain.errors import RunNotFound
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.lab.base_image import create_base_image
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.protocol import Event

_REPEATS = 3
RUN_NAME = "bench"
IMAGE = f"{REGISTRY_ADDRESS}/swarmtrain:bench"
DEPLOY_OPTIONS = ["-o", f"runner.docker_config.docker_container={IMAGE}", "-o", f"trainer.save_dir=runs/{RUN_NAME}"]
_STACK_FILE = BUILD / "run" / "generated.yml"


def measure_first_step() -> Iterator[BenchmarkRow]:
    """Measure the time, in seconds, to the first optimizer step of the quickstart, on a lab whose nodes already have the image."""
    with run_lab(3) as lab:
        provide_image(lab)
        environment = lab.build_client_environment()
        launcher = SwarmLauncher(environment["DOCKER_HOST"])
        process.run_command(
            [*SWARMTRAIN_ARGV, "generate", "examples/quickstart.yml", *DEPLOY_OPTIONS, "--name", RUN_NAME, "--output", str(_STACK_FILE)],
            env=environment,
        )
        phases: dict[str, list[dict[str, float]]] = {"swarmtrain": [], "docker": []}

        def measure_swarmtrain() -> float:
            argv = [*SWARMTRAIN_ARGV, "deploy", "examples/quickstart.yml", "--name", RUN_NAME, *DEPLOY_OPTIONS]
            return measure_command("swarmtrain", argv)

        def measure_docker() -> float:
            return measure_command("docker", ["docker", "stack", "deploy", "-c", str(_STACK_FILE), RUN_NAME])

        def measure_command(label: str, argv: list[str]) -> float:
            started_at = time.time()
            with _run_command(argv, environment):
                wait_until(lambda: _has_stepped(launcher), "the first step", timeout=300)
                durations = _measure_phases(launcher, DockerEngine(environment["DOCKER_HOST"]), started_at)
            launcher.tear_down_run(RUN_NAME, lambda line: None)
            process.run_command(["rm", "-rf", str(lab.shared_disk / RUN_NAME)])
            phases[label].append(durations)
            print_progress(f"{label}: {_format_phases([durations])}")
            return durations["first step"]

        result, baseline = measure_in_turns(_REPEATS, measure_swarmtrain, measure_docker)
    note = "; ".join(f"{label}, seconds after the command: {_format_phases(durations[1:])}" for label, durations in phases.items())
    description = "`swarmtrain deploy examples/quickstart.yml` until the first optimizer step: 3 nodes on one machine, image present"
    yield BenchmarkRow(
        "first-step", description, "s", result, baseline, "`docker stack deploy` of the file that `generate` writes", limit=25, note=note
    )


def measure_doctor() -> Iterator[BenchmarkRow]:
    """Measure the wall time, in seconds, of `doctor` with all queries and probes, on a lab whose nodes already have the image."""
    with run_lab(4) as lab:
        provide_image(lab)
        argv = [*SWARMTRAIN_ARGV, "doctor", "examples/quickstart.yml", "-o", "runner.nodes=4", *DEPLOY_OPTIONS]
        [result] = measure_in_turns(_REPEATS, lambda: measure_wall_seconds(argv, env=lab.build_client_environment()))
    description = "`swarmtrain doctor examples/quickstart.yml`: a probe of 4 nodes on one machine and all their links, image present"
    yield BenchmarkRow("doctor-4", description, "s", result, limit=20)


def provide_image(lab: Lab) -> None:
    """Build the image, push it to the lab's registry, and pull it on every node."""
    engine = DockerEngine(lab.get_docker_host("node0"), timeout=600)
    images.build_image(engine.client, ROOT, IMAGE, base_image=create_base_image, report_progress=lambda line: None)
    print_progress("pushing the image")
    images.push_image(engine.client, IMAGE, report_progress=lambda line: None)
    pinned = images.pin_image(engine, IMAGE).reference
    print_progress("pulling it on every node")
    with ThreadPoolExecutor() as pool:
        engines = [DockerEngine(lab.get_docker_host(node.node), timeout=600) for node in lab.get_status()]
        list(pool.map(lambda each: each.client.pull(pinned), engines))


@contextmanager
def _run_command(argv: list[str], environment: dict[str, str]) -> Iterator[None]:
    program = process.start_process(argv, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        program.terminate()
        program.wait()


def _has_stepped(launcher: SwarmLauncher) -> bool:
    try:
        return any(event.kind == protocol.EVENT_PROGRESS for event in launcher.read_events(RUN_NAME))
    except RunNotFound:
        return False


def _measure_phases(launcher: SwarmLauncher, engine: DockerEngine, started_at: float) -> dict[str, float]:
    """Return the seconds from `started_at` to each event, by the clocks of the processes involved, all on one machine."""
    events = launcher.read_events(RUN_NAME)
    label = f"{protocol.LABEL_STACK}={RUN_NAME}"
    services_created_at = max(_parse_timestamp(service["CreatedAt"]) for service in engine.list_objects("/services", label=label))
    containers_running_at = max(_parse_timestamp(task["Status"]["Timestamp"]) for task in engine.list_objects("/tasks", label=label))
    moments = {
        "services created": services_created_at,
        "containers running": containers_running_at,
        "coordinator up": _find_event_time(events, protocol.EVENT_COORDINATOR_STARTED, min),
        "nodes joined": _find_event_time(events, protocol.EVENT_NODE_JOINED, max),
        "world formed": _find_event_time(events, protocol.EVENT_WORLD_FORMED, min),
        "validation loss": _find_event_time(events, protocol.EVENT_EVALUATION, min),
        "first step": _find_event_time(events, protocol.EVENT_PROGRESS, min),
    }
    return {name: moment - started_at for name, moment in moments.items()}


def _find_event_time(events: list[Event], kind: str, select: Callable[[Iterator[float]], float]) -> float:
    return select(event.time for event in events if event.kind == kind)


def _parse_timestamp(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def _format_phases(measured_phases: list[dict[str, Any]]) -> str:
    return ", ".join(f"{name} {statistics.median(durations[name] for durations in measured_phases):.1f}" for name in measured_phases[0])
