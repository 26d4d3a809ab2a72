"""A run of a hundred services whose containers do nothing, brought up and taken down by us and by plain Docker.

What `deploy` calls is measured from the plan on, against `docker stack deploy` of the stack file of the same plan.
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

from benchmarks.labs import lab
from benchmarks.measure import BUILD, ROOT, SWARMTRAIN, Row, Sample, Unavailable, in_turns, say, until, wall_seconds
from swarmtrain import images, process, wire
from swarmtrain.config.load import load
from swarmtrain.lab import REGISTRY, Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.plan import Cargo, CodeFile, Plan, PlannedNode
from swarmtrain.render import compose

_RUNS = 2
_NODES = 4
_SERVICES = 100
_RUN = "hundred"
_IMAGE = f"{REGISTRY}/idle:bench"
_PLAN = BUILD / "hundred" / "plan"
_SHOW_PLAN = """
import pickle, sys
from pathlib import Path
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.view.runs import show_plan
show_plan(SwarmLauncher(), pickle.loads(Path(sys.argv[1]).read_bytes()), as_json=False)
"""
_STACK = BUILD / "hundred" / "generated.yml"
# Noise of a machine that starts a hundred containers: a tenth.
_NOISE = 1.1


@dataclass(frozen=True)
class Times:
    """Seconds after the command: the last service was made, all containers ran; seconds that the removal took."""

    created: float
    running: float
    removed: float


def hundred() -> Iterator[Row]:
    """A hundred services on four engines."""
    with lab(_NODES) as place:
        engine = Engine(place.docker_host("node0"))
        _provide_image(engine)
        plan = _plan(place)
        compose.write(compose.stack(plan), _STACK)
        ours, dockers = [], []
        for turn in range(_RUNS + 1):
            mine, theirs = _ours(engine, plan), _dockers(engine)
            say(f"ours {mine}, docker's {theirs}")
            if turn:  # the first pulls the image
                ours.append(mine)
                dockers.append(theirs)
    yield from _rows(ours, dockers)


def status_and_plan() -> Iterator[Row]:
    """`status` and `plan` of such a run, from the command's start to its end."""
    with lab(_NODES) as place:
        engine = Engine(place.docker_host("node0"))
        _provide_image(engine)
        plan = _plan(place)
        SwarmLauncher(engine.address).up(plan, lambda line: None)
        _PLAN.parent.mkdir(parents=True, exist_ok=True)
        _PLAN.write_bytes(pickle.dumps(plan))
        env = {"DOCKER_HOST": engine.address, "XDG_STATE_HOME": str(BUILD / "state")}
        shown, planned = in_turns(
            5,
            lambda: wall_seconds([*SWARMTRAIN, "status", _RUN], env),
            lambda: wall_seconds([sys.executable, "-c", _SHOW_PLAN, str(_PLAN)], env),
        )
        SwarmLauncher(engine.address).down(_RUN, lambda line: None)
    of = f"of a run of {_SERVICES} services"
    yield Row("status-100", f"`swarmtrain status` {of}", "s", shown, limit=1)
    note = "all but the reading of the config: no config makes so many nodes of four machines"
    yield Row("status-100/plan", f"`swarmtrain plan` {of}, with what a deploy would change", "s", planned, limit=1, note=note)


def _rows(ours: list[Times], dockers: list[Times]) -> Iterator[Row]:
    whats = {
        "created": ("until 100 services are made", "`docker stack deploy`"),
        "running": ("until the containers of 100 services run", "`docker stack deploy`"),
        "removed": ("until nothing is left of 100 services", "`docker stack rm`, and waiting until nothing is left"),
    }
    for name, (what, other_is) in whats.items():
        mine, theirs = (Sample.of([getattr(times, name) for times in found]) for found in (ours, dockers))
        limit = {"created": theirs.median + 0.5, "running": theirs.median * _NOISE}.get(name)
        yield Row(f"services-100/{name}", f"seconds {what}, on {_NODES} engines", "s", mine, theirs, other_is, limit)


def _plan(place: Lab) -> Plan:
    """Return the plan of a run whose 99 nodes share the lab's machines; with its notice board that makes a hundred services."""
    hosts = [node.node for node in place.status()]
    count = _SERVICES - 1
    overrides = [f"runner.nodes={count}", f"runner.min_nodes={count}", f"runner.max_nodes={count}", "runner.docker_config.docker_mounts=[]"]
    config = load(ROOT / "examples/quickstart.yml", [*overrides, f"runner.docker_config.docker_container={_IMAGE}"])
    code = (CodeFile.of(config.runner.script.name, b"idle\n"),)
    machines = [hosts[index % len(hosts)] for index in range(count)]
    nodes = tuple(
        PlannedNode(f"node{index}", host, f"node.hostname=={host}", 1, "shares its machine") for index, host in enumerate(machines)
    )
    return Plan(run=_RUN, config=config, cargo=Cargo(code), nodes=nodes, origin="the lab")


def _ours(engine: Engine, plan: Plan) -> Times:
    launcher = SwarmLauncher(engine.address)
    begun = time.time()
    launcher.up(plan, lambda line: None)
    created, running = _made(engine, begun)
    begun = time.time()
    launcher.down(_RUN, lambda line: None)
    return Times(created, running, time.time() - begun)


def _dockers(engine: Engine) -> Times:
    docker = ["docker", "-H", engine.address, "stack"]
    begun = time.time()
    process.run([*docker, "deploy", "-c", str(_STACK), _RUN])
    created, running = _made(engine, begun)
    begun = time.time()
    process.run([*docker, "rm", _RUN])
    until(lambda: not _left(engine), "something is left of the stack", every=0.3)
    return Times(created, running, time.time() - begun)


def _made(engine: Engine, begun: float) -> tuple[float, float]:
    """Return when the last service was made and when the last container ran, by the swarm's own times."""
    until(lambda: len(_running(engine)) == _SERVICES, "not all containers run")
    services = engine.listing("/services", label=f"{wire.LABEL_STACK}={_RUN}")
    created = max(_seconds(service["CreatedAt"]) for service in services)
    return created - begun, max(_seconds(task["Status"]["Timestamp"]) for task in _running(engine)) - begun


def _running(engine: Engine) -> list[dict[str, Any]]:
    tasks = engine.listing("/tasks", label=f"{wire.LABEL_STACK}={_RUN}")
    return [task for task in tasks if task["Status"]["State"] == "running"]


def _left(engine: Engine) -> bool:
    label = f"{wire.LABEL_STACK}={_RUN}"
    return any(engine.listing(path, label=label) for path in ("/services", "/tasks", "/networks", "/configs"))


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _provide_image(engine: Engine) -> None:
    """Make an image of one program that waits for ever, and push it. A run's services call it python3."""
    program = idle_program()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo("usr/bin/python3")
        entry.size, entry.mode = len(program), 0o755
        tar.addfile(entry, io.BytesIO(program))
    engine.client.import_image_from_data(packed.getvalue(), repository=_IMAGE.rpartition(":")[0], tag=_IMAGE.rpartition(":")[2])
    images.push(engine.client, _IMAGE, say=lambda line: None)


def idle_program() -> bytes:
    """Return a program for Linux that pauses until a signal ends it: an ELF header, one segment, three instructions."""
    if platform.machine() != "x86_64":
        raise Unavailable(f"its containers' program is made for x86_64, not {platform.machine()}")
    # mov eax, 34 (pause); syscall; jmp back
    code = bytes.fromhex("b822000000 0f05 ebf7")
    base, headers = 0x400000, 64 + 56
    magic = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bits, little-endian
    head = struct.pack("<16sHHIQQQIHHHHHH", magic, 2, 62, 1, base + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = headers + len(code)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return head + segment + code
