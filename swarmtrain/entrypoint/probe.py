"""The probe role: what a node has for a job, seen from inside the job's own container, and how it reaches its peers.

Posts what it finds to the notice board, a PROBE event for the node, a LINK event for each pair that it is the first of,
and a TOGETHER event for what all ranks' first collective will be like; then leaves with 0. Standard library only.
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

from swarmtrain.board import Board
from swarmtrain.entrypoint.checks import permanent_problems, threads_per_rank
from swarmtrain.entrypoint.gpus import assigned
from swarmtrain.entrypoint.interface import Route, route
from swarmtrain.entrypoint.links import Ends, rounds
from swarmtrain.errors import EXIT_OK, BoardError
from swarmtrain.process import start
from swarmtrain.wire import LINK, PROBE, TOGETHER, WORLD, Event, NodeEnv, ProbeEnv

_WAIT_FOR_BOARD = 600.0
_MEETING = 60.0
# Who has not met everybody comes as much later to the first round.
_PARTNER = _MEETING + 10.0
_BEAT = 5.0
_TOGETHER = 90.0
_ENTRIES = 1000
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "stack": resource.RLIMIT_STACK}


def main() -> int:
    """Look at everything, tell it, and return 0. Raises BoardError if there is nobody to be told, ValueError if it is told nothing."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # not at once: the marks are to be taken away
    # A name that is not there yet is asked of the host's resolver, which may never answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    node, probe = NodeEnv.from_env(os.environ), ProbeEnv.from_env(os.environ)
    together = _Together()
    board = Board(node.board)
    board.wait(_WAIT_FOR_BOARD)
    board.join(node.node)
    threading.Thread(target=_beat, args=(board, node.node), daemon=True).start()
    way = _way(node)
    peers = [peer for peer in probe.peers if peer != node.node]
    with _marks(node) as marks:
        # Last: who is met has left its marks.
        ends = Ends(node.node, probe.probe_port, interface_mtu(way.interface), where=probe.addresses)
        facts = {"host": socket.gethostname(), **_here(node, way), "clock": board.clock()}
        names = ends.meet(peers, _MEETING)
        board.post(Event(WORLD, {"world": "probe", "world_size": len(probe.peers), "nodes": len(probe.peers), "ranks": {node.node: []}}))
        board.post(Event(PROBE, {"node": node.node, **facts, "names": names, "mounts": [_mount(node, mark) for mark in marks]}))
        together.ready()
        broken: list[str] = []
        for pairs in rounds(probe.peers):
            for a, b in (pair for pair in pairs if node.node in pair):
                link = ends.measure(a, b, patience=_PARTNER)
                broken += [link.error] if link.error else []
                if node.node == a:
                    board.post(Event(LINK, asdict(link)))
        board.post(Event(TOGETHER, {"node": node.node, **together.result(way.environment(os.environ), broken)}))
    board.leave(node.node, EXIT_OK)
    return EXIT_OK


def _beat(board: Board, name: str) -> None:
    """Let the board know that this node lives, however long it waits for its peers."""
    while True:
        with contextlib.suppress(BoardError):
            board.beat(name)
        time.sleep(_BEAT)


def _way(node: NodeEnv) -> Route:
    """Return the route by which the job's ranks would talk; one that is not there is told as a problem, and the board's is looked at."""
    try:
        return route(node.interface, node.board)
    except OSError:
        return route("", node.board)


def interface_mtu(interface: str) -> int:
    """Return the bytes of the largest packet that `interface` sends, that of Ethernet if it has no name."""
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except (OSError, ValueError):
        return 1500


def _here(node: NodeEnv, way: Route) -> dict[str, Any]:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "problems": permanent_problems(node),
        "user": f"{os.geteuid()}:{os.getegid()}",
        "address": way.address,
        "interface": way.interface,
        "chosen": way.chosen,
        "interfaces": {name: interface_mtu(name) for _, name in socket.if_nameindex() if name != "lo"},
        "slots": node.slots,
        "cores": threads_per_rank(1),
        "memory": int(memory["MemAvailable"].split()[0]) * 1024,
        "shm": _space("/dev/shm")[1],  # noqa: S108  # looked at, not written to
        "scratch": _space("/tmp")[0],  # noqa: S108
        "limits": {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()},
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "gpus": _gpus(),
        "given_gpus": list(assigned(os.environ)),
        "machine_gpus": machine_gpus(Path("/proc/driver/nvidia")),
    }


def _space(path: str) -> tuple[int, int]:
    """Return the free and all bytes of the file system at `path`."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.free, usage.total


def machine_gpus(driver: Path) -> list[str]:
    """Return the UUIDs of the machine's GPUs by its driver's folder, which a container sees if no runtime hides it."""
    found = []
    for path in sorted(driver.glob("gpus/*/information")):
        with contextlib.suppress(OSError):
            found += [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("GPU UUID")]
    return found


def _gpus() -> list[dict[str, str]]:
    """Return what the driver's own tool says of each GPU in this container."""
    if shutil.which("nvidia-smi") is None:
        return []
    argv = ["nvidia-smi", "--query-gpu=uuid,name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [{"uuid": row[0], "name": row[1], "driver": row[2]} for row in rows if len(row) == 3]


@dataclass(frozen=True)
class Mark:
    """A file of this node's in a mount: in `folder`, or None there and why that was `refused`."""

    target: str
    folder: Path
    file: Path | None = None
    refused: str = ""


@contextlib.contextmanager
def _marks(node: NodeEnv) -> Iterator[list[Mark]]:
    """Leave a file of this node's in each mount, and take it away at the end: what all share shows the files of all."""
    made = [_marked(node, target) for target in node.mounts]
    try:
        yield made
    finally:
        for mark in made:
            if mark.file is not None:
                mark.file.unlink(missing_ok=True)


def _marked(node: NodeEnv, target: str) -> Mark:
    folder = saves_to(node, Path(target))
    file = folder / f".{node.run}-{node.node}"
    try:
        file.write_text(node.node)
    except OSError as error:
        return Mark(target, folder, None, (error.strerror or str(error)).lower())
    return Mark(target, folder, file)


def saves_to(node: NodeEnv, target: Path) -> Path:
    """Return what there is already of save_dir in the mount `target`, which need be writable; the mount itself if that is elsewhere."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, StopIteration):
        save_dir: Path = Path.cwd() / json.loads(Path(node.config).read_text(encoding="utf-8"))["trainer"]["save_dir"]
        return next(path for path in (save_dir, *save_dir.parents) if path.is_relative_to(target) and path.is_dir())
    return target


def _mount(node: NodeEnv, mark: Mark) -> dict[str, Any]:
    """Return what there is to say of one mount; `seen` are the nodes whose marks are in it, `content` its fingerprint."""
    prefix = f".{node.run}-"
    # The marks of a network's file system may come late, but not later than the first peers that were met.
    names = [name for name in _names(Path(mark.target)) if not name.startswith(prefix)]
    seen = [name.removeprefix(prefix) for name in _names(mark.folder) if name.startswith(prefix)]
    entries = [_entry(Path(mark.target) / name) for name in names][:_ENTRIES]
    return {
        "target": mark.target,
        "writable": mark.file is not None,
        "refused": mark.refused,
        "owner": _owner(mark.folder),
        "free": _space(mark.target)[0],
        "seen": seen,
        "entries": len(entries),
        "content": hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:10],
    }


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names are all that is wanted
    except OSError:
        return []


def _owner(folder: Path) -> str:
    """Return the numbers of a folder's user and group, as runner.docker_config.user takes them."""
    try:
        facts = folder.stat()
    except OSError:
        return ""
    return f"{facts.st_uid}:{facts.st_gid}"


def _entry(path: Path) -> tuple[str, int]:
    """Return a file's name and size; a folder counts by its name, since file systems differ in how they count folders."""
    try:
        return path.name, path.stat().st_size if path.is_file() else -1
    except OSError:
        return path.name, -2


class _Together:
    """The first collective of all nodes, in a process of its own, which may hang or be killed without this one."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "swarmtrain.entrypoint", "together"]
        pipe = subprocess.PIPE
        self._process = start(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, die_with_parent=True)

    def ready(self) -> None:
        """Return when torch is imported, which keeps this node's cores busy for seconds, or cannot be."""
        if self._process.stdout is not None:
            self._process.stdout.readline()

    def result(self, environment: Mapping[str, str], broken: Sequence[str]) -> dict[str, Any]:
        """Let it begin, with `environment` on top of its own, and return what it found. With what is `broken` here nobody tries."""
        told = {"environment": dict(environment), "broken": ", ".join(broken)}
        try:
            output, _ = self._process.communicate(json.dumps(told).encode() + b"\n", timeout=_TOGETHER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return {"error": f"nothing came of it within {_TOGETHER:g} s"}
        lines = output.decode(errors="replace").strip().splitlines()
        for line in reversed(lines):  # torch may have the last word
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
        return {"error": lines[-1] if lines else f"exit code {self._process.returncode}"}
