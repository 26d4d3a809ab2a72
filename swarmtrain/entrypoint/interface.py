"""Which network interface leads to the rest of the run.

A container on an overlay has two, and one of them (docker_gwbridge) has the same addresses on every host; NCCL and gloo
may pick the wrong one and then hang. The route to the notice board, which every node must reach anyway, decides.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915
_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Route:
    """The way to a peer: our address on it, and the interface that has this address ("" if none could be named)."""

    address: str
    interface: str
    chosen: bool = False
    """The config says that ranks talk by it."""

    @property
    def loopback(self) -> bool:
        return self.address.startswith("127.") or self.address == "::1"

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what tells NCCL, gloo and TensorPipe to use this interface, less what `environ` already says."""
        if not self.interface:
            return {}
        wanted = {
            "NCCL_SOCKET_IFNAME": f"={self.interface}",  # "=" is exact: a bare name is a prefix, and eth1 would match eth10
            "GLOO_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
        }
        return {name: value for name, value in wanted.items() if name not in environ}


def route_to(host: str, port: int) -> Route:
    """Find the route to `host`, without sending anything. Raises OSError if the name or the network is unknown."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        ours = str(probe.getsockname()[0])
    return Route(address=ours, interface=_interface_of(ours, family))


def route(wanted: str, board: str) -> Route:
    """Return the route by which ranks talk: by what is `wanted`, else that to the `board`, host:port. Raises OSError."""
    host, _, port = board.rpartition(":")
    return route_by(wanted) if wanted else route_to(host, int(port))


def route_by(wanted: str) -> Route:
    """Find the interface that `wanted` names: by itself, by a subnet, or by an address or host name of it.

    Raises OSError if there is none.
    """
    there = {name: address for _, name in socket.if_nameindex() if (address := _ipv4_of(name))}
    subnet = ipaddress.ip_network(wanted, strict=False) if "/" in wanted else None
    for name, address in there.items():
        if name == wanted or (subnet and ipaddress.ip_address(address) in subnet):
            return Route(address, name, chosen=True)
    known = ", ".join(f"{name} {address}" for name, address in there.items())
    own = "" if subnet else _address_of(wanted)
    for name, address in there.items():
        if address == own:
            return Route(address, name, chosen=True)
    if own:
        raise OSError(f"{wanted if wanted == own else f'{wanted} is {own}, and that'} is no address of this node; it has {known}")
    raise OSError(f"no interface {wanted} has an address on this node; it has {known}")


def published_address(route: Route) -> str | None:
    """Return the address under which peers shall find this node's ranks, None for the host name.

    In a container the id is the host name, unique and resolvable by the peers; an address may be given again to a
    restarted container, which torch then takes for its own dead self. An interface that was chosen has only its address.
    """
    in_container = Path("/.dockerenv").exists() and _CONTAINER_ID.fullmatch(socket.gethostname())
    return route.address if route.chosen or route.loopback or not in_container else None


def _address_of(name: str) -> str:
    try:
        return str(socket.gethostbyname(name))
    except OSError:
        return ""


def _interface_of(address: str, family: int) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if family == socket.AF_INET6:
        return _ipv6_interfaces().get(address.partition("%")[0], "")
    return next((name for name in names if _ipv4_of(name) == address), "")


def _ipv4_of(interface: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_interfaces() -> dict[str, str]:
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return {}
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])): row[-1] for row in rows}
