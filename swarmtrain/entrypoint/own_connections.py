"""TCP connections over loopback that only processes of one user can make: any other user of the machine reaches its loopback, too.

Linux only, IPv4. Two directions:
- A server that we write accepts a connection and then reads its owner from the kernel's table of connections, /proc/net/tcp.
- A server that we do not write, such as torch's TCPStore, gets a listening socket with a random key, and so do its clients. The kernel
  signs every packet with the key (TCP_MD5SIG, RFC 2385), and drops a packet without this signature before the server sees a connection.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from pathlib import Path

_SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# Of linux/tcp.h. The key holds for all IPv4 addresses: those that begin like 0.0.0.0/0.
_TCP_MD5SIG_EXT, _TCP_MD5SIG_FLAG_PREFIX, _PREFIX_BITS = 32, 1, 0
_KEY_BYTES, _MAX_KEY_BYTES = 32, 80


def is_own_connection(connection: socket.socket) -> bool:
    """Return whether the client of an accepted IPv4 connection over loopback belongs to the user of this process. Raises OSError."""
    client, server = _format_table_address(connection.getpeername()), _format_table_address(connection.getsockname())
    for table in _SOCKET_TABLES:  # a client may use an IPv6 socket for an IPv4 address, which ends in that address
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(client) and fields[2].endswith(server):
                return int(fields[7]) == os.geteuid()
    return False


class SigningKey:
    """A random key of this process, which makes sockets that only such sockets can reach."""

    def __init__(self) -> None:
        self._option = struct.pack("=H126xBBHi", socket.AF_INET, _TCP_MD5SIG_FLAG_PREFIX, _PREFIX_BITS, _KEY_BYTES, 0)  # struct tcp_md5sig
        self._option += secrets.token_bytes(_KEY_BYTES).ljust(_MAX_KEY_BYTES, b"\0")
        try:
            self.open_socket().close()
        except OSError as error:  # a kernel that was built without TCP_MD5SIG, or in FIPS mode
            self._option = b""
            warning = f"this kernel does not sign packets ({error.strerror}): other users of this machine can reach the ranks' store"
            sys.stderr.write(f"swarmtrain: {warning}\n")

    def open_socket(self) -> socket.socket:
        """Return a new TCP socket with this key, to listen or to connect; without it if the kernel does not sign packets."""
        new_socket = socket.socket()
        if self._option:
            new_socket.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, self._option)
        return new_socket


def _format_table_address(address: tuple[str, int]) -> str:
    """Return an IPv4 address and port as the kernel prints them: hexadecimal, the address in the byte order of the machine."""
    host, port = address
    return f"{struct.unpack('=L', socket.inet_aton(host))[0]:08X}:{port:04X}"
