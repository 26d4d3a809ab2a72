"""The names in a config that Docker and Swarm read: hosts, images, volumes, labels, variables.

Each function returns what it is given, or raises ValueError with what is wrong. What passes here is not refused later by an
engine, in the middle of a deploy: the patterns are those of distribution/reference (images), volume/names (volumes) and
swarmkit's manager/constraint (labels, which become constraints).
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Any

from swarmtrain.config.base import twice

_GPU = r"(?:\d+(?::\d+)?|(?:GPU|MIG)-[A-Za-z0-9-]{1,80})"
_SLOTS = rf"slots=(?:(?P<slots>\d{{1,6}})|(?P<gpus>{_GPU}(?:,{_GPU})*,?))"
_NAME = r"[A-Za-z0-9_.-]+"
_HOST = re.compile(rf"(?P<name>{_NAME})(?:\s+{_SLOTS})?(?:\s+address=(?P<address>{_NAME}))?")
_IMAGE_PATH = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::\d{{1,5}})?/)?{_IMAGE_PATH}(?:/{_IMAGE_PATH})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9+._-]*:[0-9A-Fa-f]{32,})?"
)
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,190}")
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_INTERFACE = re.compile(r"[A-Za-z0-9_.@:-]{1,15}")
_LABEL_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]+")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9:_\s.*()?+\[\]\\^$|/-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHM = "/dev/shm"  # noqa: S108  # a path in the container
_LONGEST, _LONGEST_IMAGE, _LONGEST_RANGE = 63, 400, 10_000
_RANGE = re.compile(r"(?P<before>[^\s\[\]]*)\[(?P<ranges>[^\]]*)\](?P<after>.*)")
HOST_NETWORK = "host"
"""The network that every machine has: its own."""
MOST_SLOTS = 1024
"""Ranks on one node: far more than any machine has GPUs, and few enough to reckon with."""


def host(text: str) -> str:
    """Check an entry of `hosts`."""
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a host: write a host name, a node id, or either with its slots, as in 'gpu-1 slots=4' or 'gpu-1 slots=0,2', "
            "and its address on the ranks' network, as in 'gpu-1 address=gpu-1-ib'"
        )
    for name in (match["name"], match["address"] or ""):
        if max(map(len, name.split("."))) > _LONGEST:
            raise ValueError(f"{name}: a part of a host name has at most {_LONGEST} characters")
    if match["slots"] and not 1 <= int(match["slots"]) <= MOST_SLOTS:
        raise ValueError(f"{text!r}: slots are 1 to {MOST_SLOTS}")
    gpu_ids(host_gpus(text))
    return text


def written_out(hosts: Any) -> Any:
    """Return a list of hosts with ranges written out, as pdsh and Slurm do: 'gpu-[01-03,7] slots=4' is four hosts."""
    return tuple(each for host in hosts for each in _written_out(host)) if isinstance(hosts, list | tuple) else hosts


def _written_out(host: Any) -> list[Any]:
    match = _RANGE.fullmatch(host) if isinstance(host, str) else None
    if match is None:
        return [host]
    numbers: list[str] = []
    for part in match["ranges"].split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not first.isdigit() or not last.isdigit() or not 0 <= int(last) - int(first) < _LONGEST_RANGE:
            raise ValueError(
                f"{host!r}: a range is written as 'gpu-[01-03,7]', the lower number first, with at most {_LONGEST_RANGE} numbers"
            )
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [each for number in numbers for each in _written_out(f"{match['before']}{number}{match['after']}")]


def host_name(text: str) -> str:
    """Return the host name or node id of an entry of `hosts`."""
    return text.split(maxsplit=1)[0]


def host_slots(text: str) -> int | None:
    """Return the slots that an entry of `hosts` names, or None."""
    match = _HOST.fullmatch(text)
    return int(match["slots"]) if match and match["slots"] else len(host_gpus(text)) or None


def host_gpus(text: str) -> tuple[str, ...]:
    """Return the GPUs that an entry of `hosts` names: 'gpu-1 slots=0,2', 'gpu-1 slots=2,' or UUIDs; none if it only counts."""
    match = _HOST.fullmatch(text)
    return tuple(match["gpus"].removesuffix(",").split(",")) if match and match["gpus"] else ()


def host_address(text: str) -> str:
    """Return the address or name that an entry of `hosts` gives the host on the network that ranks use; empty if it gives none."""
    match = _HOST.fullmatch(text)
    return match["address"] or "" if match else ""


def gpu_ids(ids: tuple[str, ...]) -> tuple[str, ...]:
    """Check ids of GPUs, as the driver numbers or names them: 0, 2, GPU-8f6a…, MIG-…"""
    for gpu in ids:
        if not re.fullmatch(_GPU, gpu):
            raise ValueError(f"{gpu!r} is not a GPU: write its number or its UUID, as nvidia-smi -L shows them")
    if again := twice(ids):
        raise ValueError(f"{again} is named more than once")
    return ids


def image(text: str) -> str:
    """Check an image reference."""
    if len(text) > _LONGEST_IMAGE or not _IMAGE.fullmatch(text):
        raise ValueError(f"{text!r} is not an image: write REGISTRY/NAME:TAG, the name in lower case, as in registry.lab:5000/swarmtrain:1")
    return text


def mounts(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Check pairs of a source, a path or the name of a volume, and a target."""
    for source, target in pairs:
        if source.startswith((".", "~")):
            raise ValueError(f"{source}: a mount's source is a path on every node, so it must be absolute (or the name of a volume)")
        if not source.startswith("/") and not _VOLUME.fullmatch(source):
            raise ValueError(f"{source!r} is neither an absolute path nor the name of a volume: letters, digits, _ . and -")
        if not PurePosixPath(target).is_absolute() or PurePosixPath(target) == PurePosixPath("/"):
            raise ValueError(f"{target}: a mount's target is a path in the container and must be absolute, below /")
    if again := twice([_SHM, *(str(PurePosixPath(target)) for _, target in pairs)]):
        raise ValueError(f"{again} is the target of two mounts; {_SHM} always is one, of shm_size")
    return pairs


def volumes(named: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Check volumes and the options of Docker's local driver."""
    for name, options in named.items():
        if not _VOLUME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a volume: letters, digits, _ . and -")
        if unknown := sorted(options.keys() - {"type", "o", "device"}):
            raise ValueError(f"{name}: {', '.join(unknown)}: Docker's local driver knows type, o and device")
        nfs = options.get("type", "").startswith("nfs")
        if nfs and not ("addr=" in options.get("o", "") and options.get("device", "").startswith(":/")):
            example = "{type: nfs, o: 'addr=nas,rw', device: ':/export'}"
            raise ValueError(f"{name}: NFS wants the server in o and the path in device: {example}")
    return named


def container_path(text: str) -> str:
    """Check a folder in the container."""
    path = PurePosixPath(text)
    if not path.is_absolute() or path == PurePosixPath("/") or ".." in path.parts:
        raise ValueError(f"{text}: a folder in the container must be absolute, below /")
    return text


def user(text: str) -> str:
    """Check a user by number, with a group or without."""
    if not re.fullmatch(r"\d{1,10}(?::\d{1,10})?", text):
        raise ValueError(f"{text!r} is not a user: write its number, or that and its group's: 1000:1000; `id` shows them")
    return text


def network(name: str) -> str:
    """Check the name of an overlay network, or that of the machines' own."""
    if name in ("bridge", "none") or not _NETWORK.fullmatch(name):
        raise ValueError(f"{name}: name an overlay network, or host, or leave it out to get one of the stack's own")
    return name


def interface(text: str) -> str:
    """Check the name of a network interface, or a subnet of which it has an address."""
    if "/" in text:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r} is not a subnet: write one as 10.1.0.0/16") from None
    elif not _INTERFACE.fullmatch(text):
        raise ValueError(f"{text!r} is not an interface: write its name, such as ib0, or its subnet, such as 10.1.0.0/16")
    return text


def labels(wanted: dict[str, str]) -> dict[str, str]:
    """Check labels by which nodes are chosen."""
    for key, value in wanted.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(
                f"{key}={value}: Swarm finds nodes by labels of letters and digits alone, not with braces, quotes, commas or ="
            )
    return wanted


def variables(named: dict[str, Any]) -> dict[str, Any]:
    """Check names of environment variables."""
    for name in named:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a variable name: letters, digits and _ only")
        if name.startswith("SWARMTRAIN_"):
            raise ValueError(f"{name}: names that begin with SWARMTRAIN_ are swarmtrain's own")
    return named


def secrets(named: dict[str, Any]) -> dict[str, Any]:
    """Check names of secrets, which become files and variables."""
    for name in variables(named):
        if len(name) > _LONGEST:
            raise ValueError(f"{name}: the name of a secret has at most {_LONGEST} characters")
    return named
