"""Probe of the network link between each pair of nodes: round-trip time, largest unfragmented packet, and bandwidth in each direction.

Both nodes of a pair measure the link. Pairs are scheduled in rounds of disjoint pairs, so that a node takes part in only one measurement
at a time. All nodes run the same rounds in the same order, and wait only for their partner. Standard library only.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROUND_TRIPS = 40
_ROUND_TRIPS_SECONDS = 0.15
_STREAM_SECONDS = 0.25
_CHUNK_BYTES = 1 << 16
# A limited send buffer: a slow link would take seconds to deliver a larger one after sending ends.
_SEND_BUFFER_BYTES = 1 << 18
_DATAGRAM_WAIT_SECONDS = 0.1
_SOCKET_TIMEOUT_SECONDS = 3.0
# Time to retry a connection to a peer that was reached before: on a busy machine an overlay network occasionally loses a peer temporarily.
_CONNECT_RETRY_SECONDS = 20.0
_UNRESPONSIVE_SECONDS = 20.0
_HEADER_BYTES = 28
_PACKET_SIZES = (576, 1000, 1200, 1280, 1350, 1370, 1400, 1420, 1450, 1480, 1500, 4000, 8000, 8950, 9000)
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # not in Python's socket module; Linux constants
_MORE_MARK, _LAST_MARK = b"\1", b"\0"


@dataclass(frozen=True)
class Link:
    """Measurements of the link between the nodes `a` and `b`. Values not measured are 0. `error`: why a measurement failed."""

    a: str
    b: str
    round_trip: float = 0.0
    """Median round-trip time in seconds."""
    forward_bandwidth: float = 0.0
    """Bandwidth from a to b in bytes per second, by one TCP stream."""
    backward_bandwidth: float = 0.0
    """Bandwidth from b to a in bytes per second, by one TCP stream."""
    largest_packet: int = 0
    """Size in bytes of the largest tested IP packet that arrives unfragmented in both directions."""
    error: str = ""


def schedule_node_pairs(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return every pair of `names` once, in rounds of disjoint pairs: n-1 rounds for n names, or n if n is odd.

    Uses the circle method of round-robin tournaments (Kirkman, 1847): one name keeps its position, the others rotate
    by one position per round.
    """
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(a, b) if names.index(a) < names.index(b) else (b, a) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


class LinkProber:
    """Measures all links of this node. It listens for peers from the start, and connects to each in its round."""

    def __init__(
        self, node_name: str, port: int, mtu: int, bind_address: str = "", peer_addresses: Mapping[str, str] | None = None
    ) -> None:
        """Listen on TCP and UDP `port` of the address `bind_address`. `mtu` is the MTU of the interface that leads to the peers.

        `peer_addresses`: address or name of peers that cannot be found by their node name. Raises OSError if the port cannot be bound.
        """
        self.name, self._port, self._mtu, self._bind = node_name, port, mtu, bind_address
        self._peer_addresses = peer_addresses or {}
        self._addresses: dict[str, str] = {}
        self._incoming: dict[str, socket.socket] = {}
        self._caller_arrived = threading.Condition()
        self._received_sizes: dict[str, set[int]] = {}
        self._server = socket.create_server((bind_address, port), backlog=64)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        self._udp.bind((bind_address, port))
        for serve in (self._accept_connections, self._receive_datagrams):
            threading.Thread(target=serve, daemon=True).start()

    def wait_for_peers(
        self, peers: Sequence[str], timeout: float, unresponsive_timeout: float = _UNRESPONSIVE_SECONDS
    ) -> dict[str, float | None]:
        """Wait until all `peers` listen. Return for each peer the seconds to resolve its name; None if the peer did not answer.

        A name that resolves means that the peer exists: if the peer then does not answer for `unresponsive_timeout` seconds, waiting for it
        ends. The lookup of a name that does not exist yet may block for many seconds, so each peer is resolved in its own thread, and the
        returned time is that of a second lookup, after the peer has answered.
        """
        deadline = time.monotonic() + timeout
        lookup_times: dict[str, float | None] = dict.fromkeys(peers)
        # Daemon threads instead of a pool: on a stop, the process does not wait for them.
        threads = [
            threading.Thread(target=self._wait_for_peer, args=(peer, deadline, unresponsive_timeout, lookup_times), daemon=True)
            for peer in peers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return lookup_times

    def _wait_for_peer(self, peer: str, deadline: float, unresponsive_timeout: float, lookup_times: dict[str, float | None]) -> None:
        is_resolved = False
        while time.monotonic() < deadline:
            try:
                address = socket.gethostbyname(self._peer_addresses.get(peer, peer))
                if not is_resolved:
                    is_resolved, deadline = True, min(deadline, time.monotonic() + unresponsive_timeout)
                with socket.create_connection((address, self._port), timeout=1.0) as connection:
                    connection.sendall(b"\n")
                self._addresses[peer] = address
                lookup_started = time.monotonic()
                socket.gethostbyname(self._peer_addresses.get(peer, peer))
                lookup_times[peer] = time.monotonic() - lookup_started
                return
            except OSError:
                time.sleep(0.1)

    def measure_link(self, first_node: str, second_node: str, partner_timeout: float) -> Link:
        """Measure the link between `first_node` and `second_node`, one of which is this node, and return the measurements.

        `partner_timeout`: seconds to wait for the other node.
        """
        partner = second_node if self.name == first_node else first_node
        if partner not in self._addresses:
            return Link(first_node, second_node, error=f"{partner} cannot be reached from {self.name}")
        try:
            connection = (
                self._connect_to_peer(second_node, partner_timeout)
                if self.name == first_node
                else self._wait_for_client(first_node, partner_timeout)
            )
            with connection:
                return (
                    _measure_link_as_client(self, connection, first_node, second_node)
                    if self.name == first_node
                    else _measure_link_as_server(self, connection, first_node, second_node)
                )
        except (OSError, ValueError) as error:
            return Link(first_node, second_node, error=str(error) or type(error).__name__)

    def send_datagrams(self, address: str) -> None:
        """Send UDP datagrams of many sizes to `address`, with fragmentation disabled."""
        for size in sorted({size for size in (*_PACKET_SIZES, self._mtu) if size <= self._mtu}):
            for _ in range(2):
                try:
                    self._udp.sendto(bytes(size - _HEADER_BYTES), (address, self._port))
                except OSError:  # larger than the interface's MTU
                    break

    def get_received_packet_sizes(self, address: str) -> set[int]:
        """Return the sizes in bytes of the packets received from `address`."""
        return set(self._received_sizes.get(address, set()))

    def _connect_to_peer(self, peer: str, partner_timeout: float) -> socket.socket:
        """Return a TCP connection to `peer` once it is ready for the measurement."""
        try:
            connection = self._connect_with_retries(self._addresses[peer])
            connection.sendall(self.name.encode() + b"\n")
            connection.settimeout(partner_timeout)
            _receive_exact_bytes(connection, 1)
        except OSError as error:
            raise OSError(f"{peer} cannot be reached from {self.name}: {error}") from None
        return connection

    def _connect_with_retries(self, address: str) -> socket.socket:
        deadline = time.monotonic() + _CONNECT_RETRY_SECONDS
        while True:
            try:
                return socket.create_connection((address, self._port), timeout=_SOCKET_TIMEOUT_SECONDS, source_address=(self._bind, 0))
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _wait_for_client(self, peer: str, partner_timeout: float) -> socket.socket:
        with self._caller_arrived:
            if not self._caller_arrived.wait_for(lambda: peer in self._incoming, partner_timeout):
                raise OSError(f"{peer} did not connect to {self.name}")
            connection = self._incoming.pop(peer)
        connection.sendall(_MORE_MARK)
        return connection

    def _accept_connections(self) -> None:
        while True:
            connection, _ = self._server.accept()
            connection.settimeout(_SOCKET_TIMEOUT_SECONDS)
            try:
                name = _receive_line(connection).decode()
            except (OSError, ValueError):  # not a peer, or one that has disconnected
                name = ""
            if not name:
                connection.close()
                continue
            with self._caller_arrived:
                self._incoming[name] = connection
                self._caller_arrived.notify_all()

    def _receive_datagrams(self) -> None:
        while True:
            datagram, (address, _) = self._udp.recvfrom(1 << 16)
            self._received_sizes.setdefault(address, set()).add(len(datagram) + _HEADER_BYTES)


def _measure_link_as_client(prober: LinkProber, connection: socket.socket, client_node: str, server_node: str) -> Link:
    _configure_socket(connection)
    round_trips: list[float] = []
    started_at = time.monotonic()
    while len(round_trips) < _ROUND_TRIPS and time.monotonic() - started_at < _ROUND_TRIPS_SECONDS:
        sent_at = time.perf_counter()
        connection.sendall(_MORE_MARK)
        _receive_exact_bytes(connection, 1)
        round_trips.append(time.perf_counter() - sent_at)
    connection.sendall(_LAST_MARK)
    largest_packet = _probe_path_mtu(prober, connection)
    median_round_trip = statistics.median(round_trips)
    try:
        forward_bandwidth = _send_stream(connection)
        backward_bandwidth = _receive_stream(connection)
        _send_json(connection, backward_bandwidth)
    except OSError as error:  # small packets came through, so return what was measured
        return Link(client_node, server_node, median_round_trip, largest_packet=largest_packet, error=f"the data transfer stalled: {error}")
    return Link(client_node, server_node, median_round_trip, forward_bandwidth, backward_bandwidth, largest_packet)


def _measure_link_as_server(prober: LinkProber, connection: socket.socket, client_node: str, server_node: str) -> Link:
    _configure_socket(connection)
    while _receive_exact_bytes(connection, 1) == _MORE_MARK:
        connection.sendall(_MORE_MARK)
    largest_packet = _probe_path_mtu(prober, connection)
    forward_bandwidth = _receive_stream(connection)
    _send_json(connection, forward_bandwidth)
    backward_bandwidth = _send_stream(connection)
    return Link(client_node, server_node, 0.0, forward_bandwidth, backward_bandwidth, largest_packet)


def _configure_socket(connection: socket.socket) -> None:
    connection.settimeout(_SOCKET_TIMEOUT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


def _probe_path_mtu(prober: LinkProber, connection: socket.socket) -> int:
    """Exchange datagrams of many sizes with the peer, and return the largest size in bytes that passed in both directions."""
    address = connection.getpeername()[0]
    prober.send_datagrams(address)
    time.sleep(_DATAGRAM_WAIT_SECONDS)
    _send_json(connection, sorted(prober.get_received_packet_sizes(address)))
    partner_sizes = set(_receive_json(connection))
    return max(partner_sizes & prober.get_received_packet_sizes(address), default=0)


def _send_stream(connection: socket.socket) -> float:
    """Send a TCP stream for `_STREAM_SECONDS`. Return the rate that the receiver reports, in bytes per second."""
    chunk = _MORE_MARK + bytes(_CHUNK_BYTES - 1)
    deadline = time.monotonic() + _STREAM_SECONDS
    while time.monotonic() < deadline:
        connection.sendall(chunk)
    connection.sendall(_LAST_MARK + bytes(_CHUNK_BYTES - 1))
    return float(_receive_json(connection))


def _receive_stream(connection: socket.socket) -> float:
    """Receive a TCP stream until the sender marks its last chunk. Return the rate in bytes per second."""
    received_bytes = 0
    is_last = _receive_exact_bytes(connection, _CHUNK_BYTES)[:1] == _LAST_MARK
    started_at = time.monotonic()  # the clock starts after the first chunk, which is not counted
    while not is_last:
        is_last = _receive_exact_bytes(connection, _CHUNK_BYTES)[:1] == _LAST_MARK
        received_bytes += _CHUNK_BYTES
    return received_bytes / max(time.monotonic() - started_at, 1e-6)


def _send_json(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _receive_json(connection: socket.socket) -> Any:
    return json.loads(_receive_line(connection))


def _receive_line(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: _receive_exact_bytes(connection, 1), b"\n"))


def _receive_exact_bytes(connection: socket.socket, count: int) -> bytes:
    return b"".join(_receive_chunks(connection, count))


def _receive_chunks(connection: socket.socket, byte_count: int) -> Iterator[bytes]:
    while byte_count:
        piece = connection.recv(byte_count)
        if not piece:
            raise OSError("the peer has closed the connection")
        byte_count -= len(piece)
        yield piece
