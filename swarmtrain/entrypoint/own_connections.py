"""TCP connections over loopback that only processes of one user can make: any other user of the machine reaches its loopback, too.

Linux only, IPv4. Two directions:
- A server that we write accepts a connection and then reads its owner from the kernel's table of connections, /proc/net/tcp.
- A server that we do not write, such as torch's TCPStore, gets a listening socket with a packet filter (SO_ATTACH_FILTER, as in the
  kernel's Documentation/networking/filter.rst). It drops each packet that does not come from one source port. This process holds that port
  on all addresses with SO_REUSEPORT, so that only sockets of its own user can bind it (socket(7)).
"""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import os
import socket
import struct
import sys
from pathlib import Path

_SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_SO_ATTACH_FILTER = 26
# Instructions of classic BPF: load the half-word at an offset of the TCP header; compare it; return the number of bytes to keep.
_LOAD_HALF_WORD, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x15, 0x06
_SOURCE_PORT_OFFSET, _WHOLE_PACKET = 0, 0xFFFFFFFF
_LOOPBACK_NETWORK = int(ipaddress.IPv4Address("127.0.0.0"))
_FIRST_SOURCE, _SOURCE_COUNT = 1 << 16, 1 << 23
"""Source addresses are 127.1.0.0 and above: two connections from one port need two addresses."""


def is_own_connection(connection: socket.socket) -> bool:
    """Return whether the client of an accepted IPv4 connection over loopback belongs to the user of this process. Raises OSError."""
    client, server = _format_table_address(connection.getpeername()), _format_table_address(connection.getsockname())
    for table in _SOCKET_TABLES:  # a client may use an IPv6 socket for an IPv4 address, which ends in that address
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(client) and fields[2].endswith(server):
                return int(fields[7]) == os.geteuid()
    return False


class SourcePort:
    """A source port of this user, and the connections that come from it."""

    def __init__(self) -> None:
        """Reserve a free port. Raises OSError."""
        self._reservation = _open_reusable_socket()
        self._reservation.bind(("", 0))
        self._port = int(self._reservation.getsockname()[1])
        self._addresses = itertools.count()

    def bind_listener(self, port: int) -> socket.socket:
        """Return a socket that listens on `port` of a free loopback address, and that only connections from this source port reach.

        Raises OSError.
        """
        listener = socket.socket()
        instructions = (
            (_LOAD_HALF_WORD, 0, 0, _SOURCE_PORT_OFFSET),
            (_JUMP_IF_EQUAL, 0, 1, self._port),
            (_RETURN, 0, 0, _WHOLE_PACKET),
            (_RETURN, 0, 0, 0),
        )
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in instructions))
        try:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(instructions), ctypes.addressof(program)))
        except PermissionError:  # some kernels allow packet filters to root only
            sys.stderr.write("swarmtrain: this user may not filter packets: other users of this machine can reach the ranks' store\n")
        listener.bind((self._next_address(), port))
        listener.listen(socket.SOMAXCONN)
        return listener

    def open_socket(self) -> socket.socket:
        """Return a new socket, bound to this source port, for a connection to a loopback address. Raises OSError."""
        connection = _open_reusable_socket()
        connection.bind((self._next_address(), self._port))
        return connection

    def _next_address(self) -> str:
        return str(ipaddress.IPv4Address(_LOOPBACK_NETWORK + _FIRST_SOURCE + next(self._addresses) % _SOURCE_COUNT))


def _open_reusable_socket() -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return connection


def _format_table_address(address: tuple[str, int]) -> str:
    """Return an IPv4 address and port as the kernel prints them: hexadecimal, the address in the byte order of the machine."""
    host, port = address
    return f"{struct.unpack('=L', socket.inet_aton(host))[0]:08X}:{port:04X}"
