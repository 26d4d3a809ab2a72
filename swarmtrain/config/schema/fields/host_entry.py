"""An entry of `runner.hosts`: 'gpu-1', 'gpu-1 slots=4', 'gpu-1 slots=0,2', 'gpu-1 slots=4 address=gpu-1-ib'."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from swarmtrain.config.schema.section import format_duplicates

MAX_NAME_LENGTH = 63
"""Maximum number of characters of one label of a host name (RFC 1035)."""
MAX_SLOTS = 1024
"""Maximum number of ranks per node: far above the number of GPUs in any machine, but small enough that plans stay fast."""
_MAX_HOSTS = 10_000
_GPU_PATTERN = r"(?:\d+(?::\d+)?|(?:GPU|MIG)-[A-Za-z0-9-]{1,80})"
_SLOTS_PATTERN = rf"slots=(?:(?P<slots>\d{{1,6}})|(?P<gpus>{_GPU_PATTERN}(?:,{_GPU_PATTERN})*,?))"
_NAME_PATTERN = r"[_.-]*[A-Za-z0-9][A-Za-z0-9_.-]*"  # at least one letter or digit: not . or ..
_ENTRY = re.compile(rf"(?P<name>{_NAME_PATTERN})(?:\s+{_SLOTS_PATTERN})?(?:\s+address=(?P<address>{_NAME_PATTERN}))?")
_RANGE = re.compile(r"(?P<before>[^\s\[\]]*)\[(?P<ranges>[^\]]*)\](?P<after>.*)")


@dataclass(frozen=True)
class HostEntry:
    """A parsed entry of `runner.hosts`: a host with its slots, GPUs and address."""

    text: str
    """The entry as written in the config."""
    name: str
    """Host name or node id."""
    slots: int | None = None
    """Number of ranks; None if the entry does not set it."""
    gpus: tuple[str, ...] = ()
    """GPUs by number or UUID; empty unless the entry lists them."""
    address: str = ""
    """Address or host name on the network for ranks; empty if the entry does not set it."""

    @classmethod
    def parse(cls, text: str) -> HostEntry:
        """Return the host entry that `text` describes. Raises ValueError with the reason if `text` is invalid."""
        match = _ENTRY.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a valid host: write a host name or node id, optionally with its slots, as in 'gpu-1 slots=4' or "
                "'gpu-1 slots=0,2', and with its address on the ranks' network, as in 'gpu-1 address=gpu-1-ib'"
            )
        for name in (match["name"], match["address"] or ""):
            if name.startswith("-"):
                raise ValueError(f"{name}: a host name cannot begin with '-', because ssh and docker would read it as an option")
            if max(map(len, name.split("."))) > MAX_NAME_LENGTH:
                raise ValueError(f"{name}: a label of a host name may have at most {MAX_NAME_LENGTH} characters")
        if match["slots"] and not 1 <= int(match["slots"]) <= MAX_SLOTS:
            raise ValueError(f"{text!r}: slots must be between 1 and {MAX_SLOTS}")
        gpus = check_gpu_ids(tuple(match["gpus"].removesuffix(",").split(",")) if match["gpus"] else ())
        return cls(text, match["name"], int(match["slots"]) if match["slots"] else len(gpus) or None, gpus, match["address"] or "")


def check_host_entry(text: str) -> str:
    """Return `text` unchanged if it is a valid host entry. Raises ValueError with the reason if it is not."""
    return HostEntry.parse(text).text


def check_gpu_ids(ids: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPU ids `ids` unchanged if each is a GPU number or UUID, as nvidia-smi -L shows: 0, 2, GPU-8f6a…, MIG-…

    Raises ValueError if one is invalid.
    """
    for gpu in ids:
        if not re.fullmatch(_GPU_PATTERN, gpu):
            raise ValueError(f"{gpu!r} is not a GPU id: use a GPU index or UUID, as shown by nvidia-smi -L")
    if duplicates := format_duplicates(ids):
        raise ValueError(f"{duplicates} is listed more than once")
    return ids


def expand_host_ranges(hosts: Any) -> Any:
    """Return the list `hosts` with ranges expanded, as in pdsh and Slurm: 'gpu-[01-03,7] slots=4' becomes four hosts.

    A value that is not a list is returned unchanged. Raises ValueError if a range is invalid, or if there are more than 10,000 hosts.
    """
    if not isinstance(hosts, list | tuple):
        return hosts
    expanded_hosts: list[Any] = []
    for host in hosts:
        expanded_hosts += _expand_host_range(host, _MAX_HOSTS - len(expanded_hosts))
    return tuple(expanded_hosts)


def _expand_host_range(host: Any, max_hosts: int) -> list[Any]:
    """Return the hosts for which the entry `host` stands. Raises ValueError if a range is invalid, or these are more than `max_hosts`."""
    match = _RANGE.fullmatch(host) if isinstance(host, str) else None
    if match is None:
        return [host]
    numbers: list[str] = []
    for number_range in match["ranges"].split(","):
        first, _, last = number_range.partition("-")
        last = last or first
        if not first.isdigit() or not last.isdigit() or int(last) < int(first):
            raise ValueError(f"{host!r}: write a range as 'gpu-[01-03,7]', the lower number first")
        if int(last) - int(first) + 1 > max_hosts - len(numbers):
            raise ValueError(f"{host!r}: the ranges of runner.hosts may stand for at most {_MAX_HOSTS} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [
        expanded_host
        for number in numbers
        for expanded_host in _expand_host_range(f"{match['before']}{number}{match['after']}", max_hosts // len(numbers))
    ]
