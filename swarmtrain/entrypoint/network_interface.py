"""Find the network interface that leads to the other nodes of the run, and this machine's networks and DNS resolvers.

A container on an overlay network has two interfaces, and one of them (docker_gwbridge) has the same addresses on every host. NCCL and
gloo may pick the wrong one and then hang. This module selects the interface of the route to the coordinator, which every node must reach
anyway.
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
# Docker 25 and newer list the resolvers to which the embedded DNS server forwards queries in this comment.
_EXTERNAL_RESOLVERS_PATTERN = re.compile(r"^#\s*ExtServers:\s*\[(.*)\]", re.MULTILINE)
# The destination of the default route, and the gateway of a directly connected network.
_NO_ADDRESS = "0.0.0.0"  # noqa: S104  # compared, not listened on


@dataclass(frozen=True)
class Route:
    """Route to a peer: this node's address on the route, and the interface with this address ("" if it could not be determined)."""

    address: str
    interface: str
    is_configured: bool = False
    """Whether the config selects this interface for communication between ranks."""

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.") or self.address == "::1"

    def build_interface_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that make NCCL, gloo and TensorPipe use the interface of this route.

        Omits variables that `environ` already sets. The result is empty if the interface is unknown.
        """
        if not self.interface:
            return {}
        variables = {
            "NCCL_SOCKET_IFNAME": f"={self.interface}",  # "=" means exact: a bare name is a prefix, and eth1 would match eth10
            "GLOO_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
        }
        return {name: value for name, value in variables.items() if name not in environ}


def find_route_to_host(host: str, port: int) -> Route:
    """Return the route to `host`, without sending a packet. Raises OSError if the host name cannot be resolved or no route exists."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        local_address = str(probe.getsockname()[0])
    return Route(address=local_address, interface=_find_interface_of_address(local_address, family))


def choose_route(interface: str, coordinator_address: str) -> Route:
    """Return the route for communication between ranks: through `interface` if set, else the route to `coordinator_address` (host:port).

    Raises OSError if the route does not exist.
    """
    host, _, port = coordinator_address.rpartition(":")
    return find_route_by_interface(interface) if interface else find_route_to_host(host, int(port))


def find_route_by_interface(interface: str) -> Route:
    """Return the route through `interface`: an interface name, a subnet, or an address or host name of the interface.

    Raises OSError if no such interface exists.
    """
    addresses_by_interface = {name: address for _, name in socket.if_nameindex() if (address := _read_ipv4_address(name))}
    subnet = ipaddress.ip_network(interface, strict=False) if "/" in interface else None
    for name, address in addresses_by_interface.items():
        if name == interface or (subnet and ipaddress.ip_address(address) in subnet):
            return Route(address, name, is_configured=True)
    available = ", ".join(f"{name} {address}" for name, address in addresses_by_interface.items())
    resolved_address = "" if subnet else _resolve_host(interface)
    for name, address in addresses_by_interface.items():
        if address == resolved_address:
            return Route(address, name, is_configured=True)
    if resolved_address:
        raise OSError(
            f"{interface if interface == resolved_address else f'{interface} resolves to {resolved_address}, which'} is not an address "
            f"of this node; this node has {available}"
        )
    raise OSError(f"no interface {interface} has an address on this node; this node has {available}")


def choose_advertised_address(route: Route) -> str | None:
    """Return the address under which peers find this node's ranks; None if peers use the host name.

    In a container the host name is used: it is the container id, which is unique and resolvable by the peers. An address may be reused by
    a restarted container, which torch then mistakes for the dead one. A configured interface has no host name, so its address is used.
    """
    in_container = Path("/.dockerenv").exists() and _CONTAINER_ID.fullmatch(socket.gethostname())
    return route.address if route.is_configured or route.is_loopback or not in_container else None


def read_connected_networks(route_file: Path = Path("/proc/net/route")) -> dict[str, str]:
    """Return the IPv4 network of each interface, in CIDR notation; without interfaces that have no route."""
    networks = {}
    for line in route_file.read_text().splitlines()[1:]:
        interface, destination, gateway, *_, mask = line.split()[:8]
        if _decode_address(gateway) == _NO_ADDRESS != _decode_address(destination):
            networks[interface] = str(ipaddress.IPv4Network((_decode_address(destination), _decode_address(mask))))
    return networks


def _decode_address(text: str) -> str:
    """Return an address that the kernel prints as a hexadecimal number in the byte order of the machine."""
    return socket.inet_ntoa(struct.pack("=L", int(text, 16)))


def read_machine_resolvers(resolver_file: Path = Path("/etc/resolv.conf")) -> list[str]:
    """Return the addresses of the machine's DNS resolvers that this container must reach; empty with engines before 25.

    Resolvers as `host(127.0.0.53)` are left out: the engine queries them from the machine's own network.
    """
    match = _EXTERNAL_RESOLVERS_PATTERN.search(resolver_file.read_text())
    return [name for name in match[1].split() if "(" not in name] if match else []


def _resolve_host(name: str) -> str:
    try:
        return str(socket.gethostbyname(name))
    except OSError:
        return ""


def _find_interface_of_address(address: str, family: int) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if family == socket.AF_INET6:
        return _read_ipv6_interfaces().get(address.partition("%")[0], "")
    return next((name for name in names if _read_ipv4_address(name) == address), "")


def _read_ipv4_address(interface: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            response = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(response[20:24])


def _read_ipv6_interfaces() -> dict[str, str]:
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return {}
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])): row[-1] for row in rows}
