"""Benchmarks of a run of 100 idle services, deployed and removed by swarmtrain and by plain Docker.

Measures `deploy` after planning, against `docker stack deploy` of the stack file of the same plan.
"""

from __future__ import annotations

import io
import pickle
import platform
import struct
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.lab_startup import run_lab
from benchmarks.measurement import (
    BUILD,
    ROOT,
    SWARMTRAIN_ARGV,
    BenchmarkRow,
    BenchmarkUnavailableError,
    Sample,
    measure_in_turns,
    measure_wall_seconds,
    print_progress,
    wait_until,
)
from swarmtrain import images, process, protocol
from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.loader import load_config
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.render import stack_document

_REPEATS = 2
_NODE_COUNT = 4
_SERVICE_COUNT = 100
_MISSING_MACHINE_REPEATS = 5
_RUN_NAME = "hundred"
IMAGE = f"{REGISTRY_ADDRESS}/idle:bench"
_PLAN_FILE = BUILD / "hundred" / "plan"
_SHOW_PLAN_SCRIPT = """
import pickle, sys
from pathlib import Path
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.operations.runs import show_plan
show_plan(SwarmLauncher(), pickle.loads(Path(sys.argv[1]).read_bytes()), as_json=False)
"""
_STACK_FILE = BUILD / "hundred" / "generated.yml"
# Tolerance for the noise of starting 100 containers: 10 %.
_NOISE_FACTOR = 1.1


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds from the command until all services were created and until all containers ran; duration of the removal in seconds."""

    created: float
    running: float
    removed: float


def measure_services() -> Iterator[BenchmarkRow]:
    """Measure the wall time, in seconds, to deploy and remove 100 services on four engines."""
    with run_lab(_NODE_COUNT) as lab:
        engine = DockerEngine(lab.get_docker_host("node0"))
        provide_image(engine)
        plan = _build_plan(lab)
        stack_document.write_stack(stack_document.render_stack(plan), _STACK_FILE)
        results, baselines = [], []
        for round_number in range(_REPEATS + 1):
            result, baseline = _measure_swarmtrain(engine, plan), _measure_docker(engine)
            print_progress(f"swarmtrain {result}, docker {baseline}")
            if round_number:  # the first round pulls the image
                results.append(result)
                baselines.append(baseline)
    yield from _build_rows(results, baselines)


def measure_status_and_plan() -> Iterator[BenchmarkRow]:
    """Measure the wall time, in seconds, of `status` and `plan` for a run of 100 services."""
    with run_lab(_NODE_COUNT) as lab:
        engine = DockerEngine(lab.get_docker_host("node0"))
        provide_image(engine)
        plan = _build_plan(lab)
        SwarmLauncher(engine.address).deploy_run(plan, lambda line: None)
        _PLAN_FILE.parent.mkdir(parents=True, exist_ok=True)
        _PLAN_FILE.write_bytes(pickle.dumps(plan))
        env = {"DOCKER_HOST": engine.address, "XDG_STATE_HOME": str(BUILD / "state")}
        status_times, plan_times = measure_in_turns(
            5,
            lambda: measure_wall_seconds([*SWARMTRAIN_ARGV, "status", _RUN_NAME], env),
            lambda: measure_wall_seconds([sys.executable, "-c", _SHOW_PLAN_SCRIPT, str(_PLAN_FILE)], env),
        )
        SwarmLauncher(engine.address).tear_down_run(_RUN_NAME, lambda line: None)
    subject = f"of a run of {_SERVICE_COUNT} services"
    yield BenchmarkRow("status-100", f"`swarmtrain status` {subject}", "s", status_times, limit=1)
    note = "without reading the config, since no config can place 100 nodes on 4 machines"
    yield BenchmarkRow(
        "status-100/plan", f"`swarmtrain plan` {subject}, with what a deploy would change", "s", plan_times, limit=1, note=note
    )


def measure_run_table() -> Iterator[BenchmarkRow]:
    """Measure the wall time, in seconds, of `ps` with 25 runs of four services."""
    with run_lab(_NODE_COUNT) as lab:
        engine = DockerEngine(lab.get_docker_host("node0"))
        provide_image(engine)
        launcher, (config, cargo) = SwarmLauncher(engine.address), build_small_run(_NODE_COUNT - 1)
        names = [f"idle{number}" for number in range(_SERVICE_COUNT // _NODE_COUNT)]
        for name in names:
            launcher.deploy_run(build_plan(config, launcher.read_inventory(config.runner), cargo, run=name), print_progress)
        env = {"DOCKER_HOST": engine.address, "XDG_STATE_HOME": str(BUILD / "state")}
        times = Sample.from_values([measure_wall_seconds([*SWARMTRAIN_ARGV, "ps"], env) for _ in range(5)])
    description = f"`swarmtrain ps` with {len(names)} runs, of {_SERVICE_COUNT} services together"
    yield BenchmarkRow("ps-100", description, "s", times, limit=1)


def measure_missing_machine() -> Iterator[BenchmarkRow]:
    """Measure the wall time, in seconds, of a deploy of four nodes with one machine powered off, against all four running."""
    with run_lab(_NODE_COUNT) as lab:
        engine = DockerEngine(lab.get_docker_host("node0"))
        provide_image(engine)
        config, cargo = build_small_run(_NODE_COUNT)

        def measure_deploys(count: int) -> list[float]:
            return [_measure_deploy(engine, config, cargo) for _ in range(count)]

        measure_deploys(1)  # pulls the image
        all_running = measure_deploys(_MISSING_MACHINE_REPEATS)
        lab.power_off_node("node3", report_progress=print_progress)
        wait_until(lambda: bool(cluster_state.read_down_nodes(engine)), "node3 does not count as down")
        one_missing = measure_deploys(_MISSING_MACHINE_REPEATS)
    result, baseline = Sample.from_values(one_missing), Sample.from_values(all_running)
    description = "plan and deploy of a run on four machines, one of which is powered off, until the command returns"
    yield BenchmarkRow("missing-machine", description, "s", result, baseline, "the same with all four running", limit=baseline.median + 2)


def build_small_run(node_count: int) -> tuple[Config, Cargo]:
    """Return the config and the cargo of a run of `node_count` idle nodes."""
    overrides = [f"runner.nodes={node_count}", "runner.docker_config.docker_mounts=[]"]
    config = load_config(ROOT / "examples/quickstart.yml", [*overrides, f"runner.docker_config.docker_container={IMAGE}"])
    return config, Cargo((RunFile.from_content(config.runner.script.name, b"idle\n"),))


def _measure_deploy(engine: DockerEngine, config: Config, cargo: Cargo) -> float:
    launcher, started_at = SwarmLauncher(engine.address), time.monotonic()
    launcher.deploy_run(build_plan(config, launcher.read_inventory(config.runner), cargo, run=_RUN_NAME), lambda line: None)
    duration = time.monotonic() - started_at
    launcher.tear_down_run(_RUN_NAME, lambda line: None)
    return duration


def _build_rows(results: list[ServiceTimes], baselines: list[ServiceTimes]) -> Iterator[BenchmarkRow]:
    descriptions = {
        "created": ("until 100 services are created", "`docker stack deploy`"),
        "running": ("until the containers of 100 services run", "`docker stack deploy`"),
        "removed": ("until all objects of 100 services are removed", "`docker stack rm` and waiting until all are removed"),
    }
    for name, (description, baseline_description) in descriptions.items():
        result, baseline = (Sample.from_values([getattr(times, name) for times in measured]) for measured in (results, baselines))
        limit = {"created": baseline.median + 0.5, "running": baseline.median * _NOISE_FACTOR}.get(name)
        yield BenchmarkRow(
            f"services-100/{name}", f"seconds {description}, on {_NODE_COUNT} engines", "s", result, baseline, baseline_description, limit
        )


def _build_plan(lab: Lab) -> Plan:
    """Return the plan of a run whose 99 nodes share the lab's machines; with its coordinator, that makes 100 services."""
    hosts = [node.node for node in lab.get_status()]
    count = _SERVICE_COUNT - 1
    overrides = [f"runner.nodes={count}", f"runner.min_nodes={count}", f"runner.max_nodes={count}", "runner.docker_config.docker_mounts=[]"]
    config = load_config(ROOT / "examples/quickstart.yml", [*overrides, f"runner.docker_config.docker_container={IMAGE}"])
    code = (RunFile.from_content(config.runner.script.name, b"idle\n"),)
    machines = [hosts[index % len(hosts)] for index in range(count)]
    nodes = tuple(
        PlannedNode(f"node{index}", host, f"node.hostname=={host}", 1, "shares its machine") for index, host in enumerate(machines)
    )
    return Plan(run=_RUN_NAME, config=config, cargo=Cargo(code), nodes=nodes, origin="the lab")


def _measure_swarmtrain(engine: DockerEngine, plan: Plan) -> ServiceTimes:
    launcher = SwarmLauncher(engine.address)
    started_at = time.time()
    launcher.deploy_run(plan, lambda line: None)
    created, running = _wait_for_services(engine, started_at)
    started_at = time.time()
    launcher.tear_down_run(_RUN_NAME, lambda line: None)
    return ServiceTimes(created, running, time.time() - started_at)


def _measure_docker(engine: DockerEngine) -> ServiceTimes:
    docker = ["docker", "-H", engine.address, "stack"]
    started_at = time.time()
    process.run_command([*docker, "deploy", "-c", str(_STACK_FILE), _RUN_NAME])
    created, running = _wait_for_services(engine, started_at)
    started_at = time.time()
    process.run_command([*docker, "rm", _RUN_NAME])
    wait_until(lambda: not _has_leftovers(engine), "the removal of the stack", interval=0.3)
    return ServiceTimes(created, running, time.time() - started_at)


def _wait_for_services(engine: DockerEngine, started_at: float) -> tuple[float, float]:
    """Return the seconds until the last service was created and the last container ran, by the swarm's timestamps."""
    wait_until(lambda: len(_list_running_tasks(engine)) == _SERVICE_COUNT, "not all containers run")
    services = engine.list_objects("/services", label=f"{protocol.LABEL_STACK}={_RUN_NAME}")
    created = max(_parse_timestamp(service["CreatedAt"]) for service in services)
    return created - started_at, max(_parse_timestamp(task["Status"]["Timestamp"]) for task in _list_running_tasks(engine)) - started_at


def _list_running_tasks(engine: DockerEngine) -> list[dict[str, Any]]:
    tasks = engine.list_objects("/tasks", label=f"{protocol.LABEL_STACK}={_RUN_NAME}")
    return [task for task in tasks if task["Status"]["State"] == "running"]


def _has_leftovers(engine: DockerEngine) -> bool:
    label = f"{protocol.LABEL_STACK}={_RUN_NAME}"
    return any(engine.list_objects(path, label=label) for path in ("/services", "/tasks", "/networks", "/configs"))


def _parse_timestamp(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def provide_image(engine: DockerEngine) -> None:
    """Build and push an image whose only program waits forever. The program is named python3, the command of a run's services."""
    program = build_idle_program()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("usr/bin/python3")
        entry.size, entry.mode = len(program), 0o755
        tar.addfile(entry, io.BytesIO(program))
    engine.client.import_image_from_data(archive.getvalue(), repository=IMAGE.rpartition(":")[0], tag=IMAGE.rpartition(":")[2])
    images.push_image(engine.client, IMAGE, report_progress=lambda line: None)


def build_idle_program() -> bytes:
    """Return an x86-64 ELF executable that pauses until a signal terminates it: ELF header, one segment, three instructions."""
    if platform.machine() != "x86_64":
        raise BenchmarkUnavailableError(f"its containers' program is built for x86_64, not {platform.machine()}")
    # mov eax, 34 (pause); syscall; jmp back
    code = bytes.fromhex("b822000000 0f05 ebf7")
    base, headers = 0x400000, 64 + 56
    magic = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bits, little-endian
    head = struct.pack("<16sHHIQQQIHHHHHH", magic, 2, 62, 1, base + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = headers + len(code)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return head + segment + code
