"""The probe role: checks from inside the job's container what the node provides for the job, and how the node reaches its peers.

Posts its results to the coordinator: a `probe` event for the node, a `link` event for each pair in which this node comes first, and a
`collective` event for the first collective of all nodes; on request, a `step_time` event. Then exits with 0. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarmtrain.entrypoint.assigned_gpus import read_assigned_gpus
from swarmtrain.entrypoint.gpu_count import list_machine_gpus
from swarmtrain.entrypoint.gpu_health import find_present_faults
from swarmtrain.entrypoint.gpu_query import GpuQuery
from swarmtrain.entrypoint.kernel_log import KernelLog
from swarmtrain.entrypoint.network_interface import Route, choose_route, read_connected_networks, read_machine_resolvers
from swarmtrain.entrypoint.preflight_checks import compute_threads_per_rank, find_permanent_problems
from swarmtrain.entrypoint.probe.link_probe import LinkProber, schedule_node_pairs
from swarmtrain.entrypoint.probe.step_time_probe import measure_step_times
from swarmtrain.errors import EXIT_OK, CoordinatorError
from swarmtrain.process import start_process
from swarmtrain.protocol import (
    EVENT_COLLECTIVE,
    EVENT_LINK,
    EVENT_NODE_PROBE,
    EVENT_STEP_TIME,
    EVENT_WORLD_FORMED,
    Event,
    NodeEnv,
    ProbeEnv,
)
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_COORDINATOR_TIMEOUT_SECONDS = 600.0
_PEERS_TIMEOUT_SECONDS = 60.0
# A partner that did not reach all its peers enters the first round up to _PEERS_TIMEOUT_SECONDS later.
_PARTNER_TIMEOUT_SECONDS = _PEERS_TIMEOUT_SECONDS + 10.0
_HEARTBEAT_SECONDS = 5.0
_COLLECTIVE_TIMEOUT_SECONDS = 90.0
_NVIDIA_SMI_TIMEOUT_SECONDS = 20.0  # without the persistence daemon, it initializes each GPU
_MAX_ENTRIES = 1000
_RESOURCE_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "stack": resource.RLIMIT_STACK}


def main() -> int:
    """Run all checks of the probe, post the results, and return 0.

    Raises CoordinatorError if the coordinator is unreachable, ValueError if the environment is invalid.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # exit by SystemExit, so that the markers are removed
    # Limit DNS lookups: a name that does not exist yet is forwarded to the host's resolver, which may never answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    env, probe_env = NodeEnv.from_env(os.environ), ProbeEnv.from_env(os.environ)
    collective = _CollectiveProbe()
    coordinator = CoordinatorClient(env.coordinator)
    coordinator.wait_until_reachable(_COORDINATOR_TIMEOUT_SECONDS)
    coordinator.register_node(env.node)
    threading.Thread(target=_send_heartbeats, args=(coordinator, env.node), daemon=True).start()
    route = _choose_rank_route(env)
    peers = [peer for peer in probe_env.peers if peer != env.node]
    with _write_markers(env) as markers:
        # Listen only after the markers are written: a peer that reaches this node can then see its markers.
        prober = LinkProber(env.node, probe_env.probe_port, read_interface_mtu(route.interface), peer_addresses=probe_env.addresses)
        facts = {"host": socket.gethostname(), **_collect_node_facts(env, route), "clock": coordinator.measure_clock_offset()}
        lookup_times = prober.wait_for_peers(peers, _PEERS_TIMEOUT_SECONDS)
        coordinator.post_event(
            Event(
                EVENT_WORLD_FORMED,
                {"world": "probe", "world_size": len(probe_env.peers), "nodes": len(probe_env.peers), "ranks": {env.node: []}},
            )
        )
        coordinator.post_event(
            Event(
                EVENT_NODE_PROBE,
                {"node": env.node, **facts, "names": lookup_times, "mounts": [_describe_mount(env, marker) for marker in markers]},
            )
        )
        collective.wait_until_ready()
        link_errors: list[str] = []
        for pairs in schedule_node_pairs(probe_env.peers):
            for a, b in (pair for pair in pairs if env.node in pair):
                link = prober.measure_link(a, b, partner_timeout=_PARTNER_TIMEOUT_SECONDS)
                link_errors += [link.error] if link.error else []
                if env.node == a:
                    coordinator.post_event(Event(EVENT_LINK, asdict(link)))
        coordinator.post_event(
            Event(
                EVENT_COLLECTIVE,
                {"node": env.node, **collective.run_collective(route.build_interface_environment(os.environ), link_errors)},
            )
        )
        if probe_env.step_time_seconds:
            coordinator.post_event(Event(EVENT_STEP_TIME, {"node": env.node, **measure_step_times(env, probe_env.step_time_seconds)}))
    coordinator.report_node_exit(env.node, EXIT_OK)
    return EXIT_OK


def _send_heartbeats(coordinator: CoordinatorClient, node: str) -> None:
    """Send heartbeats, so that the coordinator considers this node alive while it waits for its peers."""
    while True:
        with contextlib.suppress(CoordinatorError):
            coordinator.send_heartbeat(node)
        time.sleep(_HEARTBEAT_SECONDS)


def _choose_rank_route(env: NodeEnv) -> Route:
    """Return the network route that the job's ranks would use.

    If the configured route does not exist, this is reported as a problem, and the route to the coordinator is used.
    """
    try:
        return choose_route(env.interface, env.coordinator)
    except OSError:
        return choose_route("", env.coordinator)


def read_interface_mtu(interface: str) -> int:
    """Return the MTU of `interface` in bytes; 1500, the Ethernet MTU, if it is unknown."""
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except (OSError, ValueError):
        return 1500


def _collect_node_facts(env: NodeEnv, route: Route) -> dict[str, Any]:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "problems": find_permanent_problems(env),
        "user": f"{os.geteuid()}:{os.getegid()}",
        "address": route.address,
        "interface": route.interface,
        "is_configured": route.is_configured,
        "networks": read_connected_networks(),
        "resolvers": read_machine_resolvers(),
        "interfaces": {name: read_interface_mtu(name) for _, name in socket.if_nameindex() if name != "lo"},
        "slots": env.slots,
        "cores": compute_threads_per_rank(1),
        "memory": int(meminfo["MemAvailable"].split()[0]) * 1024,
        "shm": _measure_disk_space("/dev/shm")[1],  # noqa: S108  # checked, not written to
        "scratch": _measure_disk_space("/tmp")[0],  # noqa: S108
        "limits": _read_resource_limits(),
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "gpus": _list_container_gpus(),
        "assigned_gpus": list(read_assigned_gpus(os.environ)),
        "machine_gpus": list_machine_gpus(),
        "gpu_faults": _find_gpu_faults(),
    }


def _read_resource_limits() -> dict[str, int]:
    """Return the limits of a rank: the soft limits, except for open files, since the supervisor raises this limit to the hard limit."""
    limits = {name: resource.getrlimit(number) for name, number in _RESOURCE_LIMITS.items()}
    return {name: hard if name == "nofile" else soft for name, (soft, hard) in limits.items()}


def _measure_disk_space(path: str) -> tuple[int, int]:
    """Return the free and total bytes of the file system at `path`; zeros if they cannot be read."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.free, usage.total


def _find_gpu_faults() -> list[dict[str, Any]]:
    faults = find_present_faults(
        GpuQuery(_NVIDIA_SMI_TIMEOUT_SECONDS).read_sample(), KernelLog(os.environ, from_start=True).read_new_lines()
    )
    return [{"message": str(fault), "hint": fault.hint, "is_hardware": fault.is_hardware} for fault in faults]


def _list_container_gpus() -> list[dict[str, str]]:
    """Return UUID, name and driver version of each GPU visible in this container; empty if nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    argv = ["nvidia-smi", "--query-gpu=uuid,name,driver_version", "--format=csv,noheader"]
    try:
        completed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in completed.stdout.splitlines()]
    return [{"uuid": row[0], "name": row[1], "driver": row[2]} for row in rows if len(row) == 3]


@dataclass(frozen=True)
class MountMarker:
    """Marker file of this node in a mount: `file` in `folder`; None if it could not be written, with the reason in `write_error`."""

    target: str
    folder: Path
    file: Path | None = None
    write_error: str = ""


@contextlib.contextmanager
def _write_markers(env: NodeEnv) -> Iterator[list[MountMarker]]:
    """Write a marker file of this node into each mount, and remove it at the end: a shared mount shows the markers of all nodes."""
    markers = [_write_marker(env, target) for target in env.mounts]
    try:
        yield markers
    finally:
        for marker in markers:
            if marker.file is not None:
                marker.file.unlink(missing_ok=True)


def _write_marker(env: NodeEnv, mount_target: str) -> MountMarker:
    folder = find_save_folder(env, Path(mount_target))
    file = folder / f".{env.run}-{env.node}"
    try:
        file.write_text(env.node)
    except OSError as error:
        return MountMarker(mount_target, folder, None, (error.strerror or str(error)).lower())
    return MountMarker(mount_target, folder, file)


def find_save_folder(env: NodeEnv, mount_target: Path) -> Path:
    """Return the deepest existing folder on the path to save_dir in `mount_target`; `mount_target` if save_dir is not in it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, StopIteration):
        save_dir: Path = Path.cwd() / json.loads(Path(env.config).read_text(encoding="utf-8"))["trainer"]["save_dir"]
        return next(path for path in (save_dir, *save_dir.parents) if path.is_relative_to(mount_target) and path.is_dir())
    return mount_target


def _describe_mount(env: NodeEnv, marker: MountMarker) -> dict[str, Any]:
    """Return the facts of one mount: `visible_nodes` are the nodes whose markers are in it, `content_digest` is a hash of its entries."""
    prefix = f".{env.run}-"
    # A network file system may show markers late; peers that were reached have written theirs before they listened.
    names = [name for name in _list_entry_names(Path(marker.target)) if not name.startswith(prefix)]
    visible_nodes = [name.removeprefix(prefix) for name in _list_entry_names(marker.folder) if name.startswith(prefix)]
    entries = [_get_entry_name_and_size(Path(marker.target) / name) for name in names][:_MAX_ENTRIES]
    return {
        "target": marker.target,
        "writable": marker.file is not None,
        "write_error": marker.write_error,
        "owner": _read_folder_owner(marker.folder),
        "free": _measure_disk_space(marker.target)[0],
        "visible_nodes": visible_nodes,
        "entries": len(entries),
        "content_digest": hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:10],
    }


def _list_entry_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # only names are needed
    except OSError:
        return []


def _read_folder_owner(folder: Path) -> str:
    """Return the numeric user and group that own a folder, in the format of runner.docker_config.user."""
    try:
        stat = folder.stat()
    except OSError:
        return ""
    return f"{stat.st_uid}:{stat.st_gid}"


def _get_entry_name_and_size(path: Path) -> tuple[str, int]:
    """Return a directory entry's name and size in bytes.

    The size of a folder is -1, since it differs between file systems; that of an unreadable entry is -2.
    """
    try:
        return path.name, path.stat().st_size if path.is_file() else -1
    except OSError:
        return path.name, -2


class _CollectiveProbe:
    """Probe of the first collective of all nodes, in a separate process that may hang or be killed without affecting the node probe."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "swarmtrain.entrypoint", "collective"]
        pipe = subprocess.PIPE
        self._process = start_process(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, die_with_parent=True)

    def wait_until_ready(self) -> None:
        """Wait until the process has imported torch, which keeps this node's cores busy for seconds, or until the import has failed."""
        if self._process.stdout is not None:
            self._process.stdout.readline()

    def run_collective(self, environment: Mapping[str, str], link_errors: Sequence[str]) -> dict[str, Any]:
        """Run the collective with `environment` added to the process's environment variables, and return its result.

        If any node has `link_errors`, no node runs the collective.
        """
        request = {"environment": dict(environment), "broken": ", ".join(link_errors)}
        try:
            output, _ = self._process.communicate(json.dumps(request).encode() + b"\n", timeout=_COLLECTIVE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return {"error": f"no result within {_COLLECTIVE_TIMEOUT_SECONDS:g} s"}
        lines = output.decode(errors="replace").strip().splitlines()
        for line in reversed(lines):  # torch may print further lines after the result
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
        return {"error": lines[-1] if lines else f"exit code {self._process.returncode}"}
