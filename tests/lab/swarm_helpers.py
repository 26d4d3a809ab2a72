"""Helpers for tests of the Swarm launcher: a stub image that starts at once, and what exists of the run that they deploy.

The containers run a stub instead of the entrypoint: what they do does not matter in these tests.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from swarmtrain import images, protocol
from swarmtrain.images.image_client import follow_build_output
from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.protocol import PROTOCOL_VERSION

STUB_ENTRYPOINT = """
import os, signal, sys, time

# SIGTERM is waited for, not handled: a handler that prints could run inside a print of the loop below.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

def wait(seconds):
    if signal.sigtimedwait([signal.SIGTERM], seconds):
        print("[rank 0] saved", flush=True)
        time.sleep(1)  # as long as a supervisor takes to exit: Docker drops what it has not read when a container is removed
        sys.exit(75)

# The number of restarts says how the run ends: 77 well, 78 badly, and otherwise not at all.
verdict = {"77": '"status": "done", "reason": "all steps", "exit_code": 0', "78": '"status": "failed", "reason": "no luck", "exit_code": 9'}
if sys.argv[1] == "rendezvous":
    event = '{"event": "coordinator", "time": 1.0, "run": "any", "run_id": "%s", "protocol": PROTOCOL_VERSION}'
    print(event % os.environ["SWARMTRAIN_RUN_ID"], flush=True)
    wait(2)
    if os.environ["SWARMTRAIN_MAX_RESTARTS"] in verdict:
        print('{"event": "outcome", "time": 2.0, %s}' % verdict[os.environ["SWARMTRAIN_MAX_RESTARTS"]], flush=True)
        sys.exit(0)
    wait(10**6)
for step in range(10**6):
    print(f"[rank 0] step {step} of {os.environ.get('SWARMTRAIN_NODE')}" + "." * (40_000 if step == 1 else 0), flush=True)
    wait(0.3)
""".replace("PROTOCOL_VERSION", str(PROTOCOL_VERSION))
RUN = "demo"
NODES = ("node0", "node1", "node2")
DISCARD: Callable[[str], None] = lambda line: None  # noqa: E731


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def build_test_image(engine: DockerEngine, tag: str, files: dict[str, str]) -> str:
    """Build and push an image from `files` (path → content); return its tag."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    follow_build_output(
        engine.client.build(fileobj=context, custom_context=True, tag=tag, rm=True, decode=True), location=tag, report_progress=print_line
    )
    images.push_image(engine.client, tag, report_progress=print_line)
    return tag


def run_docker(lab: Lab, *arguments: str, program: str = "docker", node: str = "node0") -> str:
    """Return the output of a docker command on the engine of `node`."""
    argv = [program, "-H", lab.get_docker_host(node), *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def promote_nodes(lab: Lab, *names: str) -> None:
    """Make these nodes managers, and wait until they are: before that, the swarm would not survive the loss of node0."""
    run_docker(lab, "node", "promote", *names)
    argv = "node", "ls", "--filter", "role=manager", "--format", "{{.ManagerStatus}}"
    deadline = time.monotonic() + 60
    while run_docker(lab, *argv).split().count("Reachable") < len(names):
        assert time.monotonic() < deadline, run_docker(lab, "node", "ls")
        time.sleep(0.5)


def list_task_ids(engine: DockerEngine) -> dict[str, set[str]]:
    """Return the ids of all tasks that ever existed, by service."""
    names = {service.id: service.name for service in cluster_state.list_services(engine, RUN)}
    found: dict[str, set[str]] = {}
    for task in cluster_state.list_tasks(engine, RUN):
        found.setdefault(names.get(task.service_id, "removed"), set()).add(task.id)
    return found


def is_run_removed(lab: Lab, engine: DockerEngine) -> bool:
    """Return whether nothing of the run is left: in the swarm, under its name, or on any node."""
    containers = [run_docker(lab, "ps", "-q", "--filter", f"label={protocol.LABEL_STACK}={RUN}", node=node) for node in NODES]
    named = [name for kind in ("config", "secret", "network") for name in run_docker(lab, kind, "ls", "--format", "{{.Name}}").split()]
    run_names = [name for name in named if name.startswith(f"{RUN}_")]
    return (
        cluster_state.read_stack_state(engine, RUN).is_empty
        and not cluster_state.list_tasks(engine, RUN)
        and not any(containers)
        and not run_names
    )


def find_docker_programs() -> list[str]:
    """Return the docker clients of this machine, one of each version."""
    found = {}
    for program in (shutil.which("docker"), "/usr/bin/docker", "/usr/local/bin/docker"):
        if program and Path(program).exists():
            version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
            found.setdefault(version, program)
    return list(found.values())
