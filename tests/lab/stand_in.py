"""For tests of the Swarm launcher: an image that starts in no time, and what there is of the run that they bring up.

The containers run a stand-in for the entrypoint: what they do does not matter there.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from swarmtrain import images, wire
from swarmtrain.images.engine import follow
from swarmtrain.lab import Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe

STAND_IN = """
import os, signal, sys, time

# SIGTERM is waited for, not handled: a handler that prints could run inside a print of the loop below.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

def wait(seconds):
    if signal.sigtimedwait([signal.SIGTERM], seconds):
        print("[rank 0] saved", flush=True)
        time.sleep(1)  # as long as a supervisor takes to exit: Docker drops what it has not read when a container is removed
        sys.exit(75)

# The number of restarts says how the run ends: 77 well, 78 badly, and otherwise not at all.
verdict = {"77": '"status": "done", "why": "all steps", "exit_code": 0', "78": '"status": "failed", "why": "no luck", "exit_code": 9'}
if sys.argv[1] == "rendezvous":
    print('{"event": "board", "time": 1.0, "run": "any"}', flush=True)
    wait(2)
    if os.environ["SWARMTRAIN_MAX_RESTARTS"] in verdict:
        print('{"event": "verdict", "time": 2.0, %s}' % verdict[os.environ["SWARMTRAIN_MAX_RESTARTS"]], flush=True)
        sys.exit(0)
    wait(10**6)
for step in range(10**6):
    print(f"[rank 0] step {step} of {os.environ.get('SWARMTRAIN_NODE')}" + "." * (40_000 if step == 1 else 0), flush=True)
    wait(0.3)
"""
RUN = "demo"
NODES = ("node0", "node1", "node2")
SILENT: Callable[[str], None] = lambda line: None  # noqa: E731


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def build(engine: Engine, tag: str, files: dict[str, str]) -> str:
    """Build and push an image of `files`, path to content; return its tag."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    follow(engine.client.build(fileobj=context, custom_context=True, tag=tag, rm=True, decode=True), place=tag, say=say)
    images.push(engine.client, tag, say=say)
    return tag


def docker(lab: Lab, *arguments: str, program: str = "docker", node: str = "node0") -> str:
    """Return what docker prints, asked of the engine of `node`."""
    argv = [program, "-H", lab.docker_host(node), *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def task_ids(engine: Engine) -> dict[str, set[str]]:
    """Return the ids of all tasks there ever were, by service."""
    names = {service.id: service.name for service in observe.services(engine, RUN)}
    found: dict[str, set[str]] = {}
    for task in observe.tasks(engine, RUN):
        found.setdefault(names.get(task.service, "removed"), set()).add(task.id)
    return found


def nothing_left(lab: Lab, engine: Engine) -> bool:
    """Say whether nothing of the run is there: in the swarm, under its name, or on any node."""
    containers = [docker(lab, "ps", "-q", "--filter", f"label={wire.LABEL_STACK}={RUN}", node=node) for node in NODES]
    named = [name for kind in ("config", "secret", "network") for name in docker(lab, kind, "ls", "--format", "{{.Name}}").split()]
    mine = [name for name in named if name.startswith(f"{RUN}_")]
    return observe.observe(engine, RUN).empty and not observe.tasks(engine, RUN) and not any(containers) and not mine


def command_lines() -> list[str]:
    """Return the docker command lines of this machine, one of each version."""
    found = {}
    for program in (shutil.which("docker"), "/usr/bin/docker", "/usr/local/bin/docker"):
        if program and Path(program).exists():
            version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
            found.setdefault(version, program)
    return list(found.values())
