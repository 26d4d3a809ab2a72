"""The stored state of a lab: its folder, its description, the subnet that it uses, and the processes that it started."""

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
from swarmtrain.atomic_file import write_text_atomically
from swarmtrain.errors import LabError

MAX_NODES = 200
COMPONENTS = ("swarm", "docker", "ssh", "slurm")
_DEFAULT_BASE = Path("/var/lib/swarmtrain/lab")
_NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,29}")
_SOCKET_PATH_LIMIT = 107
_HIDDEN_FOLDERS = ("/run", "/mnt", "/proc")


@dataclass(frozen=True)
class LabDescription:
    """Settings of a lab, as stored in its lab.json.

    `engine` is the folder of the lab's dockerd, None for the dockerd in PATH. `shared` is the folder that all nodes share.
    `components` is a subset of COMPONENTS: `swarm` (Docker engines that form a swarm), `docker` (engines without a swarm), `ssh` (an sshd
    per machine) and `slurm` (a Slurm cluster). The engines of a `bare` lab do not form a swarm, regardless of `components`, and do not
    trust a registry. Each engine declares `gpus` simulated GPUs.
    """

    name: str
    subnet: str
    nodes: tuple[str, ...]
    shared: str
    engine: str | None = None
    bare: bool = False
    ready: bool = False
    gpus: int = 0
    components: tuple[str, ...] = ("swarm",)

    @property
    def has_swarm(self) -> bool:
        """Whether the machines form a swarm."""
        return "swarm" in self.components and not self.bare

    @property
    def has_engines(self) -> bool:
        """Whether each machine has a Docker engine."""
        return self.bare or "swarm" in self.components or "docker" in self.components

    def get_node_address(self, node: str) -> str:
        """Return the node's IPv4 address: .10 for node0, .11 for node1, and so on."""
        return str(ipaddress.ip_network(self.subnet)[10 + self.nodes.index(node)])

    def build_gpu_ids(self, node: str) -> list[str]:
        """Return the ids of the GPUs that the node declares, formatted like real GPU ids: GPU-node0-1 and so on."""
        return [f"GPU-{node}-{number}" for number in range(1, self.gpus + 1)]

    @property
    def bridge_address(self) -> str:
        """The address of the bridge, on which the registry listens."""
        return str(ipaddress.ip_network(self.subnet)[254])


def get_labs_folder() -> Path:
    """Return the folder that contains all labs of this machine."""
    return Path(os.environ.get("SWARMTRAIN_LAB_DIR") or _DEFAULT_BASE).absolute()


def remove_empty_labs_folder(labs_folder: Path) -> None:
    """Remove `labs_folder` if it is empty; if it is the default folder, also remove its parent."""
    with contextlib.suppress(OSError):
        labs_folder.rmdir()
        if labs_folder == _DEFAULT_BASE:
            labs_folder.parent.rmdir()


def check_lab_name(name: str) -> None:
    """Check that `name`, which is used for namespaces and folders, is a valid lab name. Raises LabError if not."""
    if not _NAME_PATTERN.fullmatch(name):
        raise LabError(
            f"{name!r} is not a valid lab name: use up to 30 lower-case letters, digits and dashes, starting with a letter or digit",
            place="lab --name",
        )


def check_components(components: Collection[str]) -> None:
    """Check that `components` is not empty and contains only known components. Raises LabError if not."""
    for component in components or [""]:
        if component not in COMPONENTS:
            raise LabError(f"{component!r} is not a known component; available components: {', '.join(COMPONENTS)}", place="lab up --with")


def check_lab_folder(lab_folder: Path) -> None:
    """Check that the machines of a lab would see `lab_folder`, and that socket paths in it are short enough. Raises LabError if not."""
    hint = "set SWARMTRAIN_LAB_DIR to a short path on a local disk"
    check_folder_visible(lab_folder, hint)
    longest = lab_folder / f"node{MAX_NODES - 1}" / "docker.sock"
    if len(os.fsencode(longest)) > _SOCKET_PATH_LIMIT:
        raise LabError(f"{longest}: the path of a socket cannot be longer than {_SOCKET_PATH_LIMIT} bytes", place="lab", hint=hint)


def is_folder_visible(folder: Path) -> bool:
    """Return whether the machines of a lab see the same `folder` as this machine."""
    return not any(folder.resolve().is_relative_to(hidden) for hidden in _HIDDEN_FOLDERS)


def check_folder_visible(folder: Path, hint: str) -> None:
    """Check that the machines of a lab would see `folder`. Raises LabError with `hint` if not."""
    if not is_folder_visible(folder):
        raise LabError(
            f"{folder}: is not visible in a lab, whose machines have their own {', '.join(_HIDDEN_FOLDERS)}", place="lab", hint=hint
        )


def choose_subnet(lab_name: str, taken_networks: Collection[str]) -> str:
    """Return a free /24 subnet of 10.77.0.0/16 for the lab `lab_name`.

    The same name results in the same subnet, unless that subnet overlaps with `taken_networks` (in CIDR notation). Raises
    LabError if no subnet is free.
    """
    networks = [ipaddress.ip_network(network, strict=False) for network in taken_networks]
    first = hashlib.sha256(lab_name.encode()).digest()[0]
    for step in range(256):
        subnet = ipaddress.ip_network(f"10.77.{(first + step) % 256}.0/24")
        if not any(subnet.overlaps(network) for network in networks):
            return str(subnet)
    raise LabError("all of 10.77.0.0/16 is in use on this machine", place="lab", hint="ip route; swarmtrain lab status")


def list_taken_subnets(labs_folder: Path) -> set[str]:
    """Return the subnets of all labs under `labs_folder` and the networks to which this machine has routes, in CIDR notation."""
    routes = json.loads(process.run_command(["ip", "-j", "-4", "route", "show"]))
    return {description.subnet for description in list_labs(labs_folder)} | {route["dst"] for route in routes if route["dst"] != "default"}


def list_labs(labs_folder: Path) -> list[LabDescription]:
    """Return the description of every lab under `labs_folder`, running or not."""
    descriptions = (read_lab_description(directory) for directory in sorted(labs_folder.glob("*/")))
    return [description for description in descriptions if description]


def read_lab_description(lab_folder: Path) -> LabDescription | None:
    """Return the description of the lab in `lab_folder`; None if it does not exist. Raises LabError if its lab.json is invalid."""
    try:
        fields = json.loads((lab_folder / "lab.json").read_text())
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return LabDescription(**{**fields, **lists})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise LabError(f"{lab_folder / 'lab.json'} cannot be read: {error}", place="lab", hint="remove that file") from None


def write_lab_description(lab_folder: Path, description: LabDescription) -> None:
    """Write the lab's description atomically."""
    write_text_atomically(lab_folder / "lab.json", json.dumps(asdict(description), indent=2) + "\n")


@contextlib.contextmanager
def lock_labs(labs_folder: Path) -> Iterator[None]:
    """Hold the exclusive lock for creating and removing labs under `labs_folder`; wait until the lock is free."""
    labs_folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(labs_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True)
class LabDaemon:
    """A background process of the lab, which daemon.sh recorded in `record_path` by its pid and start time."""

    record_path: Path

    @property
    def pid(self) -> int | None:
        """Pid of the process on this machine while it is alive; None otherwise."""
        recorded = _parse_proc_stat(self.record_path)
        if recorded is None:
            return None
        pid, _, start_time = recorded
        current = _parse_proc_stat(Path(f"/proc/{pid}/stat"))
        return pid if current and current[2] == start_time and current[1] not in "ZX" else None

    def spawn(self, argv: list[str], *, enter_command: list[str], log: Path) -> None:
        """Start `argv` with the command prefix `enter_command` in the background, and wait until it is recorded.

        The output of `argv` is appended to `log`. Raises LabError with the end of the log if the process is not recorded within 5 s.
        """
        self.record_path.unlink(missing_ok=True)
        recorder = ["sh", str(Path(__file__).with_name("daemon.sh")), str(self.record_path)]
        with log.open("ab") as output:
            process.start_process(["setsid", "--fork", *enter_command, *recorder, *argv], stdout=output, stderr=output).wait()
        deadline = time.monotonic() + 5
        while not self.record_path.exists():
            if time.monotonic() > deadline:
                raise LabError(f"{argv[0]} does not start:\n{read_last_log_lines(log)}", place="lab")
            time.sleep(0.002)

    def kill(self) -> None:
        """Send SIGKILL to the process and wait until it has exited. Does nothing if it is not running. Raises LabError after 10 s."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.pid is not None:
            if time.monotonic() > deadline:
                raise LabError(f"process {pid} does not exit after being killed", place="lab", hint=f"cat /proc/{pid}/stack")
            time.sleep(0.005)


def read_last_log_lines(log: Path, line_count: int = 12) -> str:
    """Return the last `line_count` lines of a log file, or the error message if it cannot be read."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-line_count:])
    except OSError as error:
        return str(error)


def _parse_proc_stat(path: Path) -> tuple[int, str, str] | None:
    """Return pid, state letter and start time from a file in the format of /proc/PID/stat; None if it cannot be read."""
    try:
        head, _, tail_text = path.read_text().rpartition(")")
        fields = tail_text.split()
        return int(head.split()[0]), fields[0], fields[19]
    except (OSError, ValueError, IndexError):
        return None
