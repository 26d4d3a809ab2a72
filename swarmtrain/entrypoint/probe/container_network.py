"""What the container's network configuration shows: the networks of its interfaces, and the DNS resolvers of its machine.

Standard library only.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from pathlib import Path

# Docker 25 and newer list the resolvers to which the embedded DNS server forwards queries in this comment.
_EXTERNAL_RESOLVERS_PATTERN = re.compile(r"^#\s*ExtServers:\s*\[(.*)\]", re.MULTILINE)
# The destination of the default route, and the gateway of a directly connected network.
_NO_ADDRESS = "0.0.0.0"  # noqa: S104  # compared, not listened on


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
