"""Validators of config values that Docker and Swarm interpret: hosts, images, volumes, labels, variables.

Each check returns its argument, or raises ValueError with the reason. A value that passes is not refused by an engine
in the middle of a deploy: the patterns are those of distribution/reference (images), volume/names (volumes) and
swarmkit's manager/constraint (labels, which become constraints).
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Any

from swarmtrain.config.schema.base import format_duplicates

_GPU_PATTERN = r"(?:\d+(?::\d+)?|(?:GPU|MIG)-[A-Za-z0-9-]{1,80})"
_SLOTS_PATTERN = rf"slots=(?:(?P<slots>\d{{1,6}})|(?P<gpus>{_GPU_PATTERN}(?:,{_GPU_PATTERN})*,?))"
_NAME_PATTERN = r"[A-Za-z0-9_.-]+"
_HOST = re.compile(rf"(?P<name>{_NAME_PATTERN})(?:\s+{_SLOTS_PATTERN})?(?:\s+address=(?P<address>{_NAME_PATTERN}))?")
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
_MAX_NAME_LENGTH, _MAX_IMAGE_LENGTH, _MAX_RANGE_SIZE = 63, 400, 10_000
_RANGE = re.compile(r"(?P<before>[^\s\[\]]*)\[(?P<ranges>[^\]]*)\](?P<after>.*)")
HOST_NETWORK = "host"
"""The machines' own network."""
MAX_SLOTS = 1024
"""Maximum number of ranks per node: far more than any machine has GPUs, but small enough to compute with."""


def check_host_entry(text: str) -> str:
    """Check a `hosts` entry."""
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a host: write a host name, a node id, or either with its slots, as in 'gpu-1 slots=4' or 'gpu-1 slots=0,2', "
            "and its address on the ranks' network, as in 'gpu-1 address=gpu-1-ib'"
        )
    for name in (match["name"], match["address"] or ""):
        if max(map(len, name.split("."))) > _MAX_NAME_LENGTH:
            raise ValueError(f"{name}: a part of a host name has at most {_MAX_NAME_LENGTH} characters")
    if match["slots"] and not 1 <= int(match["slots"]) <= MAX_SLOTS:
        raise ValueError(f"{text!r}: slots are 1 to {MAX_SLOTS}")
    check_gpu_ids(parse_host_gpus(text))
    return text


def expand_host_ranges(hosts: Any) -> Any:
    """Return a list of hosts with ranges expanded, as in pdsh and Slurm: 'gpu-[01-03,7] slots=4' is four hosts."""
    return (
        tuple(expanded_host for host in hosts for expanded_host in _expand_host_range(host)) if isinstance(hosts, list | tuple) else hosts
    )


def _expand_host_range(host: Any) -> list[Any]:
    match = _RANGE.fullmatch(host) if isinstance(host, str) else None
    if match is None:
        return [host]
    numbers: list[str] = []
    for number_range in match["ranges"].split(","):
        first, _, last = number_range.partition("-")
        last = last or first
        if not first.isdigit() or not last.isdigit() or not 0 <= int(last) - int(first) < _MAX_RANGE_SIZE:
            raise ValueError(
                f"{host!r}: a range is written as 'gpu-[01-03,7]', the lower number first, with at most {_MAX_RANGE_SIZE} numbers"
            )
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [expanded_host for number in numbers for expanded_host in _expand_host_range(f"{match['before']}{number}{match['after']}")]


def parse_host_name(text: str) -> str:
    """Return the host name or node id of a `hosts` entry."""
    return text.split(maxsplit=1)[0]


def parse_host_slots(text: str) -> int | None:
    """Return the number of slots of a `hosts` entry, or None if it has none."""
    match = _HOST.fullmatch(text)
    return int(match["slots"]) if match and match["slots"] else len(parse_host_gpus(text)) or None


def parse_host_gpus(text: str) -> tuple[str, ...]:
    """Return the GPUs that a `hosts` entry names: 'gpu-1 slots=0,2', 'gpu-1 slots=2,' or UUIDs; empty if it has only a count."""
    match = _HOST.fullmatch(text)
    return tuple(match["gpus"].removesuffix(",").split(",")) if match and match["gpus"] else ()


def parse_host_address(text: str) -> str:
    """Return the host's address or name on the ranks' network from a `hosts` entry; empty if it has none."""
    match = _HOST.fullmatch(text)
    return match["address"] or "" if match else ""


def check_gpu_ids(ids: tuple[str, ...]) -> tuple[str, ...]:
    """Check GPU ids, by number or name in the driver: 0, 2, GPU-8f6a…, MIG-…"""
    for gpu in ids:
        if not re.fullmatch(_GPU_PATTERN, gpu):
            raise ValueError(f"{gpu!r} is not a GPU: write its number or its UUID, as nvidia-smi -L shows them")
    if duplicates := format_duplicates(ids):
        raise ValueError(f"{duplicates} is named more than once")
    return ids


def check_image_reference(text: str) -> str:
    """Check an image reference."""
    if len(text) > _MAX_IMAGE_LENGTH or not _IMAGE.fullmatch(text):
        raise ValueError(f"{text!r} is not an image: write REGISTRY/NAME:TAG, the name in lower case, as in registry.lab:5000/swarmtrain:1")
    return text


def check_mounts(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Check pairs of a source (a path or a volume name) and a target."""
    for source, target in pairs:
        if source.startswith((".", "~")):
            raise ValueError(f"{source}: a mount's source is a path on every node, so it must be absolute (or the name of a volume)")
        if not source.startswith("/") and not _VOLUME.fullmatch(source):
            raise ValueError(f"{source!r} is neither an absolute path nor the name of a volume: letters, digits, _ . and -")
        if not PurePosixPath(target).is_absolute() or PurePosixPath(target) == PurePosixPath("/"):
            raise ValueError(f"{target}: a mount's target is a path in the container and must be absolute, below /")
    if duplicates := format_duplicates([_SHM, *(str(PurePosixPath(target)) for _, target in pairs)]):
        raise ValueError(f"{duplicates} is the target of two mounts; {_SHM} always is one, of shm_size")
    return pairs


def check_volumes(volume_options: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Check volumes and their options for Docker's local driver."""
    for name, options in volume_options.items():
        if not _VOLUME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a volume: letters, digits, _ . and -")
        if unknown := sorted(options.keys() - {"type", "o", "device"}):
            raise ValueError(f"{name}: {', '.join(unknown)}: Docker's local driver knows type, o and device")
        nfs = options.get("type", "").startswith("nfs")
        if nfs and not ("addr=" in options.get("o", "") and options.get("device", "").startswith(":/")):
            example = "{type: nfs, o: 'addr=nas,rw', device: ':/export'}"
            raise ValueError(f"{name}: NFS wants the server in o and the path in device: {example}")
    return volume_options


def check_container_path(text: str) -> str:
    """Check a folder in the container."""
    path = PurePosixPath(text)
    if not path.is_absolute() or path == PurePosixPath("/") or ".." in path.parts:
        raise ValueError(f"{text}: a folder in the container must be absolute, below /")
    return text


def check_user(text: str) -> str:
    """Check a numeric user id, with or without a group id."""
    if not re.fullmatch(r"\d{1,10}(?::\d{1,10})?", text):
        raise ValueError(f"{text!r} is not a user: write its number, or that and its group's: 1000:1000; `id` shows them")
    return text


def check_network_name(name: str) -> str:
    """Check the name of an overlay network, or `host`."""
    if name in ("bridge", "none") or not _NETWORK.fullmatch(name):
        raise ValueError(f"{name}: name an overlay network, or host, or leave it out to get one of the stack's own")
    return name


def check_interface(text: str) -> str:
    """Check the name of a network interface, or a subnet that it has an address in."""
    if "/" in text:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r} is not a subnet: write one as 10.1.0.0/16") from None
    elif not _INTERFACE.fullmatch(text):
        raise ValueError(f"{text!r} is not an interface: write its name, such as ib0, or its subnet, such as 10.1.0.0/16")
    return text


def check_node_labels(node_labels: dict[str, str]) -> dict[str, str]:
    """Check node labels that select nodes."""
    for key, value in node_labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(
                f"{key}={value}: Swarm finds nodes by labels of letters and digits alone, not with braces, quotes, commas or ="
            )
    return node_labels


def check_variable_names(variable_values: dict[str, Any]) -> dict[str, Any]:
    """Check names of environment variables."""
    for name in variable_values:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a variable name: letters, digits and _ only")
        if name.startswith("SWARMTRAIN_"):
            raise ValueError(f"{name}: names that begin with SWARMTRAIN_ are swarmtrain's own")
    return variable_values


def check_secret_names(secret_files: dict[str, Any]) -> dict[str, Any]:
    """Check names of secrets, which become files and variables."""
    for name in check_variable_names(secret_files):
        if len(name) > _MAX_NAME_LENGTH:
            raise ValueError(f"{name}: the name of a secret has at most {_MAX_NAME_LENGTH} characters")
    return secret_files
