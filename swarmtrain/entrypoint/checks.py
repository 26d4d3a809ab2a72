"""What must be true on a node before an agent is worth starting. Standard library only: the image may be broken."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from swarmtrain.entrypoint.interface import route_by
from swarmtrain.entrypoint.usage import Cgroup, usable_cores
from swarmtrain.wire import NodeEnv

_SHM = "/dev/shm"  # noqa: S108  # looked at, not written to
_SHM_WANTED = 1 << 30


def permanent_problems(node: NodeEnv) -> list[str]:
    """Return what is broken here for good, so that starting again cannot help: one sentence each."""
    problems = []
    if not Path(node.script).is_file():
        problems.append(f"the script {node.script} does not exist on this node")
    problems += _config_problems(node.config)
    problems += [
        f"the secret {name} is not at {path}, where this node was told it is"
        for name, path in node.secrets.items()
        if not Path(path).is_file()
    ]
    problems += [
        f"the mount {target} cannot be read by user {os.geteuid()}, which this container runs as: chmod -R a+rX its source on this node"
        for target in node.mounts
        if not os.access(target, os.R_OK | os.X_OK if Path(target).is_dir() else os.R_OK)
    ]
    problems += _interface_problems(node.interface)
    if importlib.util.find_spec("torch") is None:
        problems.append("python cannot find torch: the image needs torch 2.11 or newer")
    try:
        Path(node.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problems.append(f"cannot make the log directory {node.log_dir}: {error.strerror}")
    return problems


def _interface_problems(wanted: str) -> list[str]:
    try:
        if wanted:
            route_by(wanted)
    except OSError as error:
        return [f"runner.interface, or address= in runner.hosts: {error}"]
    return []


def _config_problems(path: str) -> list[str]:
    try:
        json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return [f"cannot read the config {path}: {error.strerror}"]
    except ValueError as error:
        return [f"the config {path} is not JSON: {error}"]
    return []


def warnings(node: NodeEnv) -> list[str]:
    """Return what will probably hurt, but is no reason to refuse."""
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        return []
    size = shm.f_frsize * shm.f_blocks
    if node.slots > 1 and size < _SHM_WANTED:
        return [f"{_SHM} has {size >> 20} MiB for {node.slots} ranks; data loaders and NCCL want at least 1024 MiB"]
    return []


def threads_per_rank(slots: int) -> int:
    """Return how many of this node's cores each of `slots` ranks may use, at least 1."""
    return max(1, int(usable_cores(Cgroup())) // slots)
