"""What a node uses of its machine: CPU, memory and GPUs, read where the kernel and the driver say so.

In a container, its control group has counted all that ever ran in it. Elsewhere (a local run) that group is the user's whole
session, and the processes below the supervisor are added up instead. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swarmtrain.board import Board
from swarmtrain.errors import BoardError, ProcessError
from swarmtrain.process import run
from swarmtrain.wire import USAGE, Event

_EVERY = 10.0
_TOOL = "nvidia-smi"
_ASKED = ("utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
_ALWAYS = 3
"""So many of these every driver knows."""
_THROTTLED = 0xE8
"""Of the bits by which a driver says why clocks are low, those for heat and want of power: not 0x4, its own cap, which full load meets."""
_GPUS_WITHIN = 5.0
_MIB = 2**20
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Cgroup:
    """A container's control group, of either version, seen from inside; `root` is where they are mounted.

    What the kernel does not say is None.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._root = root
        self._one = (root / "memory").is_dir()

    def cpu_seconds(self) -> float | None:
        """Return the CPU time, in seconds, of all that ever ran here."""
        if self._one:
            used = _number(self._root / "cpuacct" / "cpuacct.usage")
            return None if used is None else used / 1e9
        used = _fields(self._root / "cpu.stat").get("usage_usec")
        return None if used is None else used / 1e6

    def cpus(self) -> float | None:
        """Return how many CPUs it may use at once, if there is a limit."""
        if self._one:
            quota, period = (_number(self._root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        else:
            quota, period = (int(word) if word.isdigit() else None for word in (_text(self._root / "cpu.max") or "max 0").split())
        return quota / period if quota and period and quota > 0 else None

    def memory(self) -> int | None:
        """Return the bytes in use, less what the kernel can drop: the pages of files that nobody has touched for a while."""
        folder, name = (self._root / "memory", "usage_in_bytes") if self._one else (self._root, "current")
        used = _number(folder / f"memory.{name}")
        idle = _fields(folder / "memory.stat").get("total_inactive_file" if self._one else "inactive_file", 0)
        return None if used is None else max(0, used - idle)

    def memory_limit(self) -> int | None:
        """Return the most bytes that it may use, if there is a limit."""
        limit = _number(self._root / "memory" / "memory.limit_in_bytes" if self._one else self._root / "memory.max")
        return limit if limit is not None and limit < machine_memory() else None

    def oom_kills(self) -> int:
        """Return how many of its processes the kernel has killed for want of memory."""
        file = self._root / "memory" / "memory.oom_control" if self._one else self._root / "memory.events"
        return _fields(file).get("oom_kill", 0)


def usable_cores(cgroup: Cgroup | None = None) -> float:
    """Return how many cores this process may use at once: the least of its CPU affinity, the quota of `cgroup`, and SWARMTRAIN_CORES.

    A lab sets SWARMTRAIN_CORES on its nodes, since all of them run on the cores of one machine.
    """
    limits = [float(len(os.sched_getaffinity(0))), cgroup.cpus() if cgroup else None]
    share = os.environ.get("SWARMTRAIN_CORES", "")
    limits.append(float(share) if share.isdigit() and int(share) else None)
    return min(limit for limit in limits if limit)


class Meter:
    """Measures this process and what is below it: by `cgroup`, or by /proc without one."""

    def __init__(self, cgroup: Cgroup | None) -> None:
        self._cgroup = cgroup
        self._before = time.monotonic(), self._cpu_seconds(), *network_bytes()

    def read(self) -> dict[str, Any]:
        """Return what is used: cpu of cpus, memory of memory_limit in bytes, received and sent in bytes a second, gpus if there are any.

        What is counted is an average since the last call.
        """
        now = time.monotonic(), self._cpu_seconds(), *network_bytes()
        seconds, used, received, sent = (after - before for after, before in zip(now, self._before, strict=True))
        self._before, seconds = now, max(1e-3, seconds)
        found = {
            "cpu": round(max(0.0, used) / seconds, 2),
            "cpus": usable_cores(self._cgroup),
            "memory": (self._cgroup.memory() if self._cgroup else None) or sum(_resident(pid) for pid in _family()),
            "memory_limit": (self._cgroup.memory_limit() if self._cgroup else None) or machine_memory(),
            "received": round(max(0, received) / seconds),
            "sent": round(max(0, sent) / seconds),
        }
        gpus = read_gpus()
        return {**found, "gpus": gpus} if gpus else found

    def _cpu_seconds(self) -> float:
        counted = self._cgroup.cpu_seconds() if self._cgroup else None
        return sum(_cpu(pid) for pid in _family()) if counted is None else counted


class Reporter(threading.Thread):
    """Posts to the board, every `every` seconds, what `node` uses; while the board is away, nothing is missed that matters."""

    def __init__(self, board: Board, node: str, every: float = _EVERY) -> None:
        super().__init__(name="usage", daemon=True)
        self._board, self._node, self._every = board, node, every

    def run(self) -> None:
        """Measure and post, as long as the process lives."""
        meter = Meter(own_cgroup())
        while True:
            time.sleep(self._every)
            with contextlib.suppress(BoardError):
                self._board.post(Event(USAGE, {"node": self._node, **meter.read()}))


def own_cgroup() -> Cgroup | None:
    """Return the control group that is this container's alone, or None where we are not a container's first program."""
    return Cgroup() if 1 in (os.getpid(), os.getppid()) or _in_container() else None


def read_gpus() -> list[dict[str, Any]]:
    """Return what each GPU does; nothing where the driver's tool is not there.

    use in percent, memory and memory_total in bytes; where the driver says so, temperature in degrees Celsius, power in watts, and
    throttled: whether clocks are low for heat or want of power.
    """
    if shutil.which(_TOOL) is None:
        return []
    found = []
    for line in _ask(_ASKED) or _ask(_ASKED[:_ALWAYS]):
        use, memory, total, *more = (cell.strip() for cell in line.split(","))
        with contextlib.suppress(ValueError):  # [N/A], as of a GPU that is cut up
            found.append({"use": int(use), "memory": int(memory) * _MIB, "memory_total": int(total) * _MIB, **_heat(*more)})
    return found


def _ask(what: Sequence[str]) -> list[str]:
    try:
        return run([_TOOL, f"--query-gpu={','.join(what)}", "--format=csv,noheader,nounits"], timeout=_GPUS_WITHIN).splitlines()
    except ProcessError:
        return []


def _heat(temperature: str = "", power: str = "", reasons: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        found["temperature"] = int(temperature)
    with contextlib.suppress(ValueError):
        found["power"] = round(float(power))
    with contextlib.suppress(ValueError):
        found["throttled"] = bool(int(reasons, 16) & _THROTTLED)
    return found


def network_bytes() -> tuple[int, int]:
    """Return the bytes received and sent by this network namespace's interfaces, loopback left out."""
    lines = (_text(Path("/proc/net/dev")) or "").splitlines()[2:]
    counts = [line.partition(":")[2].split() for line in lines if line.split(":")[0].strip() != "lo"]
    return sum(int(fields[0]) for fields in counts), sum(int(fields[8]) for fields in counts)


def machine_memory() -> int:
    """Return the bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def _in_container() -> bool:
    # The agent is further down; PID 1 of a machine is another program than a container's.
    return "SWARMTRAIN_NODE" in os.environ and b"swarmtrain.entrypoint" in _bytes(Path("/proc/1/cmdline"))


def _family() -> Iterator[int]:
    """Yield this process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = [os.getpid()]
    while waiting:
        yield (pid := waiting.pop())
        waiting += children.get(pid, [])


def _cpu(pid: int) -> float:
    """Return the CPU time of a process and of the children that it has outlived."""
    fields = _stat(pid)
    return sum(int(field) for field in fields[11:15]) / _TICKS if fields else 0.0


def _resident(pid: int) -> int:
    """Return the bytes in memory that are the process's own."""
    fields = (_text(Path(f"/proc/{pid}/statm")) or "").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE if fields else 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the program's name, which may have spaces in it."""
    return (_text(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    return _bytes(path).decode(errors="replace") or None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
