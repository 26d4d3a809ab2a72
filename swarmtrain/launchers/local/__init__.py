"""The local launcher: the nodes of a run are processes on this machine, without Docker and without root.

It is the SSH launcher with this machine as the only host. Each node is a supervisor with the same environment variables as under Swarm, and
the nodes use a real rendezvous on loopback ports. Each node gets its share of the machine's cores and GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import find_capabilities
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.ssh import SshLauncher
from swarmtrain.launchers.ssh.host_connections import LOCALHOST, ConnectionPool, HostGroup, StateDirectoryHost
from swarmtrain.launchers.ssh.process_specs import HostContext
from swarmtrain.launchers.ssh.run_index import LOOPBACK, RunIndex, RunRecord
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement
from swarmtrain.planning.plan import Plan

_MAX_NODES = 64
_NVIDIA_GPUS_FOLDER = Path("/proc/driver/nvidia/gpus")


class _LocalRunIndex(RunIndex):
    """Index of the local runs: the records in their folders."""

    def write_record(self, run: str, record: RunRecord) -> None:
        """Do nothing: the record is written as the last of the run's files."""

    def remove_record(self, run: str) -> None:
        """Do nothing: the record is removed as the last of the run's files."""


class LocalLauncher(SshLauncher):
    """Launcher for runs on this machine. Implements swarmtrain.launchers.base.Launcher, which documents each method."""

    runner_type = "local"
    capabilities = find_capabilities("local")

    def __init__(self) -> None:
        self._connections = ConnectionPool(StateDirectoryHost)
        self._index = _LocalRunIndex(self.runner_type, self._connections)

    @property
    def location(self) -> str:
        return "this machine"

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        """There are more machines than any plan needs, all of which are this machine."""
        return Inventory("this machine", (Machine(host=LOCALHOST),) * _MAX_NODES)

    def check_plan(self, plan: Plan) -> list[Finding]:
        findings = []
        if importlib.util.find_spec("torch") is None:
            hint = "pip install 'swarmtrain[train]'"
            findings.append(Finding("this machine", f"{sys.executable} cannot find torch, which the ranks need", hint))
        cores = len(os.sched_getaffinity(0))
        if plan.world_size > cores and not _list_visible_gpus():
            findings.append(Finding("this machine", f"{plan.world_size} ranks will share {cores} cores", fatal=False))
        return findings

    def read_placement(self, run: str) -> Placement:
        return FRESH_PLACEMENT

    def _resolve_host(self, node: PlannedNode) -> str:
        return LOCALHOST

    def _choose_coordinator_address(self, plan: Plan, deployed: RunRecord | None, host_info: dict[str, dict[str, Any]]) -> tuple[str, int]:
        return LOOPBACK, deployed.coordinator_port if deployed else _find_free_port()

    def _choose_working_folder(self, previous_record: RunRecord | None, *, is_running: bool) -> str:
        """Return the working folder of the ranks: a run keeps its own until it ends, since another project may have the same run name."""
        return super()._choose_working_folder(previous_record if is_running else None, is_running=is_running)

    def _build_host_context(self, plan: Plan, record: RunRecord, host_state: dict[str, Any], host_info: dict[str, Any]) -> HostContext:
        return replace(
            super()._build_host_context(plan, record, host_state, host_info),
            records_folder=PurePosixPath(RecordedRun(plan.run, record.identity).folder),
            default_env={node.name: _build_resource_env(plan, index) for index, node in enumerate(plan.nodes)},
        )

    def _download_history(self, host_group: HostGroup, recorded_run: RecordedRun, hosts: Sequence[str]) -> None:
        """Do nothing: the processes write their events and logs to the history."""


def _build_resource_env(plan: Plan, node_index: int) -> dict[str, str]:
    """Return the environment variables that limit a node to its share of this machine's cores, and of its GPUs if there are enough.

    The cores and GPUs are divided by max_nodes, so that scaling does not change the share of the other nodes.
    """
    slots = max(node.slots for node in plan.nodes)
    env = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // (slots * plan.max_nodes)))}
    if "OMP_NUM_THREADS" in os.environ:
        env = {}
    gpus = _list_visible_gpus()
    if len(gpus) >= slots * plan.max_nodes:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slots * node_index : slots * (node_index + 1)])
    return env


def _list_visible_gpus() -> list[str]:
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        return [device for device in visible_devices.split(",") if device]
    return [str(index) for index in range(len(list(_NVIDIA_GPUS_FOLDER.glob("*"))))]


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
