"""Subnets of a run's overlay network: which are valid, how large they must be, and which one a run gets that is too large for the default.

Swarm assigns a /24 to a network without a configured subnet. A run of more nodes gets a larger subnet of LARGE_SUBNET_RANGE, chosen by a
hash of its name. This range contains no default of Docker, Kubernetes distributions or the large clouds.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from ipaddress import IPv4Network

LARGE_SUBNET_RANGE = ipaddress.IPv4Network("10.16.0.0/12")
_PRIVATE_RANGES = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))  # RFC 1918
# Maximum number of nodes by prefix length, with about 20 % of the addresses left for containers that are being replaced.
_MAX_NODES_BY_PREFIX = {24: 100, 20: 1_600, 16: 26_000}
_DEFAULT_PREFIX = 24
# The addresses of the network itself, of its gateway, and for broadcasts.
_RESERVED_ADDRESSES = 3


def check_overlay_subnet(text: str) -> str:
    """Return `text` as a private IPv4 network in CIDR notation. Raises ValueError with the reason if it is not one."""
    try:
        network = ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not an IPv4 subnet: write it like 10.20.0.0/24") from None
    if not re.search(r"/\d+$", text):
        raise ValueError(f"{text!r} has no prefix length: write it like 10.20.0.0/24")
    if str(network) != text:
        raise ValueError(f"{text!r} contains an address of a machine, not of a subnet: the subnet of this address is {network}")
    if not any(network.subnet_of(private) for private in _PRIVATE_RANGES):
        raise ValueError(f"{text} is not private: use a part of {', '.join(map(str, _PRIVATE_RANGES[:-1]))} or {_PRIVATE_RANGES[-1]}")
    return text


def count_required_addresses(max_nodes: int) -> int:
    """Return the number of addresses that the network of a run of `max_nodes` nodes uses.

    Each node and the coordinator use two: one for the container, and one for the load balancer that Swarm creates on each machine.
    """
    return 2 * (max_nodes + 1) + _RESERVED_ADDRESSES


def describe_size_problem(subnet: str, max_nodes: int) -> str:
    """Return why `subnet` is too small for a run of `max_nodes` nodes, and which prefix length is enough; empty if it is not too small."""
    size, required = IPv4Network(subnet).num_addresses, count_required_addresses(max_nodes)
    if size >= required:
        return ""
    prefix = 32 - (required - 1).bit_length()
    return (
        f"{subnet} has {size} addresses, but a run of up to {max_nodes} nodes needs {required}, at least a /{prefix}: two for each "
        f"node and for the coordinator, and {_RESERVED_ADDRESSES} that cannot be assigned"
    )


def draw_large_subnet(run: str, max_nodes: int) -> str | None:
    """Return the subnet of a run that needs more than Swarm's default of a /24, the same for each call; None if the default is enough."""
    prefix = next(prefix for prefix, limit in _MAX_NODES_BY_PREFIX.items() if max_nodes <= limit)
    return None if prefix == _DEFAULT_PREFIX else suggest_subnet(run, prefix, ())


def suggest_subnet(run: str, prefix: int, taken: Iterable[str]) -> str | None:
    """Return a subnet for `run` that overlaps with none of the networks or addresses `taken`; None if there is none.

    Without `taken`, it depends only on the arguments. A subnet larger than LARGE_SUBNET_RANGE is not suggested.
    """
    if prefix < LARGE_SUBNET_RANGE.prefixlen:
        return None
    networks = [ipaddress.ip_network(network) for network in taken]
    count, size = 1 << (prefix - LARGE_SUBNET_RANGE.prefixlen), 1 << (32 - prefix)
    first = int.from_bytes(hashlib.sha256(run.encode()).digest()[:8], "big")
    candidates = (IPv4Network((int(LARGE_SUBNET_RANGE[0]) + (first + step) % count * size, prefix)) for step in range(count))
    return next((str(subnet) for subnet in candidates if not any(subnet.overlaps(network) for network in networks)), None)
