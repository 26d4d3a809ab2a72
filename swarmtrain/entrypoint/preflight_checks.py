"""Preflight checks of a node before it starts an agent. Standard library only, since the image may be broken."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from swarmtrain.entrypoint.gpu_count import find_unused_gpu_warnings
from swarmtrain.entrypoint.network_interface import find_route_by_interface
from swarmtrain.entrypoint.resource_usage import Cgroup, count_usable_cores
from swarmtrain.protocol import NodeEnv

_SHM_PATH = "/dev/shm"  # noqa: S108  # checked, not written to
_MIN_SHM_BYTES = 1 << 30


def find_permanent_problems(env: NodeEnv) -> list[str]:
    """Return the permanent problems of this node, which a restart cannot fix: one sentence each."""
    problems = []
    if not env.module and not Path(env.script).is_file():
        problems.append(f"the script {env.script} does not exist on this node")
    problems += _check_config_file(env.config)
    problems += [
        f"the secret {name} is not at {path}, where this node's environment expects it"
        for name, path in env.secrets.items()
        if not Path(path).is_file()
    ]
    problems += [
        f"the mount {target} cannot be read by user {os.geteuid()}, which this container runs as: run chmod -R a+rX on its source on "
        f"this node"
        for target in env.mounts
        if not os.access(target, os.R_OK | os.X_OK if Path(target).is_dir() else os.R_OK)
    ]
    problems += _check_interface(env.interface)
    if importlib.util.find_spec("torch") is None:
        problems.append("python cannot find torch: the image needs torch 2.11 or newer")
    try:
        Path(env.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problems.append(f"cannot create the log directory {env.log_dir}: {error.strerror}")
    return problems


def _check_interface(interface: str) -> list[str]:
    try:
        if interface:
            find_route_by_interface(interface)
    except OSError as error:
        return [f"runner.interface, or address= in runner.hosts: {error}"]
    return []


def _check_config_file(path: str) -> list[str]:
    try:
        json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return [f"cannot read the config {path}: {error.strerror}"]
    except ValueError as error:
        return [f"the config {path} is not JSON: {error}"]
    return []


def find_node_warnings(env: NodeEnv) -> list[str]:
    """Return warnings about this node: problems that do not prevent a start but are likely to slow down or fail the run."""
    return [*_check_shared_memory(env), *find_unused_gpu_warnings(os.environ)]


def _check_shared_memory(env: NodeEnv) -> list[str]:
    try:
        shm = os.statvfs(_SHM_PATH)
    except OSError:
        return []
    size = shm.f_frsize * shm.f_blocks
    if env.slots > 1 and size < _MIN_SHM_BYTES:
        return [f"{_SHM_PATH} has {size >> 20} MiB for {env.slots} ranks; data loaders and NCCL need at least 1024 MiB"]
    return []


def compute_threads_per_rank(slots: int) -> int:
    """Return the number of CPU threads for each of `slots` ranks on this node: usable cores // slots, at least 1."""
    return max(1, int(count_usable_cores(Cgroup())) // slots)
