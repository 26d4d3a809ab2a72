"""Resource usage of a node: CPU, memory, network and GPUs, read from the kernel and the driver.

A container's cgroup accounts for all processes of the container, including those that have ended. Outside a container (a local run) the
cgroup covers the user's whole session, so the usage of the supervisor's descendants is summed instead. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swarmtrain.entrypoint.disk_space import DiskMonitor
from swarmtrain.entrypoint.gpu_health import THROTTLE_MASK, GpuHealthMonitor
from swarmtrain.entrypoint.gpu_query import GpuQuery, GpuSample
from swarmtrain.entrypoint.kernel_log import KernelLog
from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import EVENT_GPU_FAULT, EVENT_USAGE, Event
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_REPORT_INTERVAL_SECONDS = 10.0
_NO_GPUS = GpuSample()
_MIB = 2**20
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Cgroup:
    """Cgroup (version 1 or 2) of this container. `root` is the mount point of the cgroup file system.

    Values that the kernel does not provide are None.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._root = root
        self._is_v1 = (root / "memory").is_dir()

    def read_cpu_seconds(self) -> float | None:
        """Return the CPU seconds of all processes of the cgroup so far, including those that have ended."""
        if self._is_v1:
            cpu_time = _read_integer_file(self._root / "cpuacct" / "cpuacct.usage")
            return None if cpu_time is None else cpu_time / 1e9
        cpu_time = _read_counter_file(self._root / "cpu.stat").get("usage_usec")
        return None if cpu_time is None else cpu_time / 1e6

    def read_cpu_limit(self) -> float | None:
        """Return the cgroup's CPU limit in cores; None if there is no limit."""
        if self._is_v1:
            quota, period = (_read_integer_file(self._root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        else:
            quota, period = (int(word) if word.isdigit() else None for word in (_read_text_file(self._root / "cpu.max") or "max 0").split())
        return quota / period if quota and period and quota > 0 else None

    def read_memory_usage(self) -> int | None:
        """Return the memory in bytes that the cgroup uses, without inactive file pages, which the kernel can reclaim."""
        folder, name = (self._root / "memory", "usage_in_bytes") if self._is_v1 else (self._root, "current")
        usage = _read_integer_file(folder / f"memory.{name}")
        inactive = _read_counter_file(folder / "memory.stat").get("total_inactive_file" if self._is_v1 else "inactive_file", 0)
        return None if usage is None else max(0, usage - inactive)

    def read_memory_limit(self) -> int | None:
        """Return the cgroup's memory limit in bytes; None if there is no limit."""
        limit = _read_integer_file(self._root / "memory" / "memory.limit_in_bytes" if self._is_v1 else self._root / "memory.max")
        return limit if limit is not None and limit < read_machine_memory() else None

    def read_oom_kill_count(self) -> int:
        """Return how many processes of the cgroup the OOM killer has killed."""
        file = self._root / "memory" / "memory.oom_control" if self._is_v1 else self._root / "memory.events"
        return _read_counter_file(file).get("oom_kill", 0)


def count_usable_cores(cgroup: Cgroup | None = None) -> float:
    """Return the number of usable cores: the minimum of CPU affinity, the quota of `cgroup`, and SWARMTRAIN_CORES.

    A lab sets SWARMTRAIN_CORES on its nodes, since all of them run on the cores of one machine.
    """
    limits = [float(len(os.sched_getaffinity(0))), cgroup.read_cpu_limit() if cgroup else None]
    configured_cores = os.environ.get("SWARMTRAIN_CORES", "")
    limits.append(float(configured_cores) if configured_cores.isdigit() and int(configured_cores) else None)
    return min(limit for limit in limits if limit)


class UsageMeter:
    """Measures the resource usage of this process and its descendants, from `cgroup`, or from /proc if `cgroup` is None."""

    def __init__(self, cgroup: Cgroup | None) -> None:
        self._cgroup = cgroup
        self._previous_sample = time.monotonic(), self._read_cpu_seconds(), *read_network_bytes()

    def read_usage(self, gpu_sample: GpuSample = _NO_GPUS) -> dict[str, Any]:
        """Return the resource usage, with rates as averages since the last call, and with that of the GPUs in `gpu_sample`.

        The keys are cpu and cpus (in cores), memory and memory_limit (in bytes), received and sent (in bytes/s), and gpus on a node
        with GPUs.
        """
        sample = time.monotonic(), self._read_cpu_seconds(), *read_network_bytes()
        seconds, cpu_time, received, sent = (after - before for after, before in zip(sample, self._previous_sample, strict=True))
        self._previous_sample, seconds = sample, max(1e-3, seconds)
        usage = {
            "cpu": round(max(0.0, cpu_time) / seconds, 2),
            "cpus": count_usable_cores(self._cgroup),
            "memory": (self._cgroup.read_memory_usage() if self._cgroup else None)
            or sum(_read_resident_bytes(pid) for pid in _iterate_process_tree()),
            "memory_limit": (self._cgroup.read_memory_limit() if self._cgroup else None) or read_machine_memory(),
            "received": round(max(0, received) / seconds),
            "sent": round(max(0, sent) / seconds),
        }
        gpus = parse_gpu_usage(gpu_sample)
        return {**usage, "gpus": gpus} if gpus else usage

    def _read_cpu_seconds(self) -> float:
        cgroup_seconds = self._cgroup.read_cpu_seconds() if self._cgroup else None
        return sum(_read_process_cpu_seconds(pid) for pid in _iterate_process_tree()) if cgroup_seconds is None else cgroup_seconds


class UsageReporter(threading.Thread):
    """Posts the usage of `node` to the coordinator every `interval` seconds, the faults of its GPUs, and which disks are nearly full.

    `folders`: those whose disks are monitored. Reports during a coordinator outage are dropped, except those about disks. Faults are posted
    each time: the coordinator writes each only once, but forgets them if it is restarted.
    """

    def __init__(
        self, coordinator: CoordinatorClient, node: str, interval: float = _REPORT_INTERVAL_SECONDS, *, folders: Iterable[Path] = ()
    ) -> None:
        super().__init__(name="usage", daemon=True)
        self._coordinator, self._node, self._interval = coordinator, node, interval
        self._meter, self._gpu_query = UsageMeter(find_container_cgroup()), GpuQuery()
        self._health_monitor, self._kernel_log = GpuHealthMonitor(), KernelLog(os.environ)
        self._disk_monitor = DiskMonitor(node, folders)
        self._fault_events: list[Event] = []
        self._disk_events: list[Event] = []

    def run(self) -> None:
        """Measure and post the usage until the process ends."""
        self._find_faults(self._gpu_query.read_sample())
        while True:
            time.sleep(self._interval)
            sample = self._gpu_query.read_sample()
            self._find_faults(sample)
            self._disk_events += self._disk_monitor.find_nearly_full()
            with contextlib.suppress(CoordinatorError):
                for event in self._fault_events:
                    self._coordinator.post_event(event)
                while self._disk_events:
                    self._coordinator.post_event(self._disk_events[0])
                    del self._disk_events[0]
                self._coordinator.post_event(Event(EVENT_USAGE, {"node": self._node, **self._meter.read_usage(sample)}))

    def _find_faults(self, sample: GpuSample) -> None:
        faults = self._health_monitor.find_new_faults(sample, self._kernel_log.read_new_lines())
        self._fault_events += [
            Event(EVENT_GPU_FAULT, {"node": self._node, "message": str(fault), "hint": fault.hint, "is_hardware": fault.is_hardware})
            for fault in faults
        ]


def find_container_cgroup() -> Cgroup | None:
    """Return the cgroup of this container; None outside a container."""
    return Cgroup() if 1 in (os.getpid(), os.getppid()) or _is_in_container() else None


def parse_gpu_usage(sample: GpuSample) -> list[dict[str, Any]]:
    """Return the usage of each GPU in `sample`.

    The keys are utilization in percent, memory and memory_total in bytes, and, if the driver reports them, temperature in °C, power in W,
    and throttled: whether clocks are reduced because of heat or insufficient power.
    """
    usage = []
    for gpu in sample.gpus:
        with contextlib.suppress(ValueError, KeyError):  # [N/A], as for a GPU partitioned by MIG
            usage.append(
                {
                    "utilization": int(gpu["utilization.gpu"]),
                    "memory": int(gpu["memory.used"]) * _MIB,
                    "memory_total": int(gpu["memory.total"]) * _MIB,
                    **_parse_temperature_and_power(gpu),
                }
            )
    return usage


def _parse_temperature_and_power(gpu: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    with contextlib.suppress(ValueError, KeyError):
        values["temperature"] = int(gpu["temperature.gpu"])
    with contextlib.suppress(ValueError, KeyError):
        values["power"] = round(float(gpu["power.draw"]))
    with contextlib.suppress(ValueError, KeyError):
        values["throttled"] = bool(int(gpu["clocks_event_reasons.active"], 16) & THROTTLE_MASK)
    return values


def read_network_bytes() -> tuple[int, int]:
    """Return the bytes received and sent by this network namespace's interfaces, without loopback."""
    lines = (_read_text_file(Path("/proc/net/dev")) or "").splitlines()[2:]
    counts = [line.partition(":")[2].split() for line in lines if line.split(":")[0].strip() != "lo"]
    return sum(int(fields[0]) for fields in counts), sum(int(fields[8]) for fields in counts)


def read_machine_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


def _is_in_container() -> bool:
    # In a container that swarmtrain started, PID 1 runs the entrypoint; outside a container it is another program.
    return "SWARMTRAIN_NODE" in os.environ and b"swarmtrain.entrypoint" in _read_file_bytes(Path("/proc/1/cmdline"))


def _iterate_process_tree() -> Iterator[int]:
    """Yield the pids of this process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _read_stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    pending = [os.getpid()]
    while pending:
        yield (pid := pending.pop())
        pending += children.get(pid, [])


def _read_process_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of the process `pid` and of its reaped children."""
    fields = _read_stat_fields(pid)
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_SECOND if fields else 0.0


def _read_resident_bytes(pid: int) -> int:
    """Return the resident set size (RSS) of the process `pid` in bytes, without shared pages."""
    fields = (_read_text_file(Path(f"/proc/{pid}/statm")) or "").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES if fields else 0


def _read_stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program name, which may contain spaces."""
    return (_read_text_file(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()


def _read_counter_file(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_read_text_file(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_integer_file(path: Path) -> int | None:
    text = (_read_text_file(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read_text_file(path: Path) -> str | None:
    return _read_file_bytes(path).decode(errors="replace") or None


def _read_file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
