"""Where a lab is written down: its directory, its description, the subnet it took, and the processes it started."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import LabError

MAX_NODES = 200
PARTS = ("swarm", "docker", "ssh", "slurm")
_DEFAULT_BASE = Path("/var/lib/swarmtrain/lab")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,29}")
_SOCKET_PATH_LIMIT = 107
_HIDDEN_IN_MACHINES = ("/run", "/mnt", "/proc")


@dataclass(frozen=True)
class Description:
    """What a lab is, as its lab.json says. `engine` is the directory of its dockerd, None for the one in PATH.

    `shared` is the directory that all nodes share. `parts` says what the machines have, of PARTS: engines in a swarm or, as
    `docker`, in none; an sshd; a Slurm. The engines of a `bare` lab are in no swarm whatever it has, and trust no registry.
    Each engine says that it has `gpus` GPUs, which it has not.
    """

    name: str
    subnet: str
    nodes: tuple[str, ...]
    shared: str
    engine: str | None = None
    bare: bool = False
    ready: bool = False
    gpus: int = 0
    parts: tuple[str, ...] = ("swarm",)

    @property
    def swarm(self) -> bool:
        """Whether the machines form a swarm."""
        return "swarm" in self.parts and not self.bare

    @property
    def engines(self) -> bool:
        """Whether each machine has a Docker engine."""
        return self.bare or "swarm" in self.parts or "docker" in self.parts

    def address(self, node: str) -> str:
        """Return the node's IPv4 address: .10 for node0, .11 for node1, and so on."""
        return str(ipaddress.ip_network(self.subnet)[10 + self.nodes.index(node)])

    def gpu_ids(self, node: str) -> list[str]:
        """Return the ids of the GPUs that the node is said to have, in the form of real ones: GPU-node0-1 and so on."""
        return [f"GPU-{node}-{number}" for number in range(1, self.gpus + 1)]

    @property
    def bridge_address(self) -> str:
        """The address of the bridge, at which the registry listens."""
        return str(ipaddress.ip_network(self.subnet)[254])


def base_directory() -> Path:
    """Return the directory that holds all labs of this machine."""
    return Path(os.environ.get("SWARMTRAIN_LAB_DIR") or _DEFAULT_BASE).absolute()


def remove_base_if_empty(base: Path) -> None:
    """Remove the directory of all labs, and the parent that the default one has, if nothing is in them."""
    with contextlib.suppress(OSError):
        base.rmdir()
        if base == _DEFAULT_BASE:
            base.parent.rmdir()


def check_name(name: str) -> None:
    """Raise LabError unless `name` can be part of a namespace's and a directory's name."""
    if not _NAME.fullmatch(name):
        raise LabError(
            f"{name!r} cannot name a lab: up to 30 lower-case letters, digits and dashes, a letter or digit first",
            place="lab --name",
        )


def check_parts(parts: Collection[str]) -> None:
    """Raise LabError unless a lab's machines can have these `parts`, and are to have any."""
    for part in parts or [""]:
        if part not in PARTS:
            raise LabError(f"{part!r} is nothing that machines can have; there is: {', '.join(PARTS)}", place="lab up --with")


def check_directory(directory: Path) -> None:
    """Raise LabError where a machine could not see `directory`, or a socket's path in it would be too long."""
    hint = "set SWARMTRAIN_LAB_DIR to a short path on a local disk"
    check_visible(directory, hint)
    longest = directory / f"node{MAX_NODES - 1}" / "docker.sock"
    if len(os.fsencode(longest)) > _SOCKET_PATH_LIMIT:
        raise LabError(f"{longest}: the path of a socket cannot be longer than {_SOCKET_PATH_LIMIT} bytes", place="lab", hint=hint)


def visible(directory: Path) -> bool:
    """Return whether a machine of the lab has the same `directory` as this machine."""
    return not any(directory.resolve().is_relative_to(hidden) for hidden in _HIDDEN_IN_MACHINES)


def check_visible(directory: Path, hint: str) -> None:
    """Raise LabError with `hint` where a machine of the lab could not see `directory`."""
    if not visible(directory):
        raise LabError(f"{directory}: a lab's machines have their own {', '.join(_HIDDEN_IN_MACHINES)}", place="lab", hint=hint)


def choose_subnet(name: str, taken: Collection[str]) -> str:
    """Return a free /24 of 10.77.0.0/16 for the lab `name`: the same one each time, unless that overlaps with `taken`.

    `taken` are networks in CIDR notation. Raises LabError when none is free.
    """
    used = [ipaddress.ip_network(network, strict=False) for network in taken]
    first = hashlib.sha256(name.encode()).digest()[0]
    for step in range(256):
        subnet = ipaddress.ip_network(f"10.77.{(first + step) % 256}.0/24")
        if not any(subnet.overlaps(network) for network in used):
            return str(subnet)
    raise LabError("all of 10.77.0.0/16 is in use on this machine", place="lab", hint="ip route; swarmtrain lab status")


def taken_subnets(base: Path) -> set[str]:
    """Return the subnets of all labs under `base` and those that this machine has routes to, in CIDR notation."""
    routes = json.loads(process.run(["ip", "-j", "-4", "route", "show"]))
    return {found.subnet for found in all_labs(base)} | {route["dst"] for route in routes if route["dst"] != "default"}


def all_labs(base: Path) -> list[Description]:
    """Return every lab that is written down under `base`, running or not."""
    found = (read(directory) for directory in sorted(base.glob("*/")))
    return [description for description in found if description]


def read(directory: Path) -> Description | None:
    """Return the lab written down in `directory`, None if there is none."""
    try:
        fields = json.loads((directory / "lab.json").read_text())
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return Description(**{**fields, **lists})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise LabError(f"{directory / 'lab.json'} cannot be read: {error}", place="lab", hint="remove that file") from None


def write(directory: Path, description: Description) -> None:
    """Write the lab down, whole or not at all."""
    fresh = directory / "lab.json.new"
    fresh.write_text(json.dumps(asdict(description), indent=2) + "\n")
    fresh.rename(directory / "lab.json")


@contextlib.contextmanager
def locked(base: Path) -> Iterator[None]:
    """Hold the only right to make or remove labs under `base`; waits for whoever holds it."""
    base.mkdir(parents=True, exist_ok=True)
    handle = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Daemon:
    """A process that daemon.sh wrote down in `record`, recognised by its pid together with its start time."""

    record: Path

    @property
    def pid(self) -> int | None:
        """Its pid on this machine while it lives, None otherwise."""
        written = _stat(self.record)
        if written is None:
            return None
        pid, _, started = written
        now = _stat(Path(f"/proc/{pid}/stat"))
        return pid if now and now[2] == started and now[1] not in "ZX" else None

    def spawn(self, argv: list[str], *, enter: list[str], log: Path) -> None:
        """Start `argv` behind the prefix `enter`, detached, its output appended to `log`; return once it is written down.

        Raises LabError with the end of the log if that takes over 5 s.
        """
        self.record.unlink(missing_ok=True)
        recorder = ["sh", str(Path(__file__).with_name("daemon.sh")), str(self.record)]
        with log.open("ab") as output:
            process.start(["setsid", "--fork", *enter, *recorder, *argv], stdout=output, stderr=output).wait()
        deadline = time.monotonic() + 5
        while not self.record.exists():
            if time.monotonic() > deadline:
                raise LabError(f"{argv[0]} does not start:\n{tail(log)}", place="lab")
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL it and return when it is gone; nothing happens if it is not there. Raises LabError if it stays over 10 s."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.pid is not None:
            if time.monotonic() > deadline:
                raise LabError(f"process {pid} does not die", place="lab", hint=f"cat /proc/{pid}/stack")
            time.sleep(0.005)


def tail(log: Path, lines: int = 12) -> str:
    """Return the last lines of a log file, or what is wrong with it."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)


def _stat(path: Path) -> tuple[int, str, str] | None:
    """Return pid, state letter and start time from a line in the form of /proc/PID/stat."""
    try:
        before, _, after = path.read_text().rpartition(")")
        fields = after.split()
        return int(before.split()[0]), fields[0], fields[19]
    except (OSError, ValueError, IndexError):
        return None
