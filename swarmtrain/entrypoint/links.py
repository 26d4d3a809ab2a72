"""Every pair of nodes, measured by the two ends: round trip, the largest packet that passes, bandwidth each way.

Pairs meet in rounds, disjoint in each, so that nothing is measured while one of its ends is busy elsewhere. All nodes go
through the same rounds in the same order and wait for nobody but their partner. Standard library only.
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

_TRIPS = 40
_TRIPS_WITHIN = 0.15
_STREAM = 0.25
_CHUNK = 1 << 16
# What a slow link has still to carry when the sending is over: a larger buffer would take seconds there.
_BUFFER = 1 << 18
_DATAGRAMS_ARRIVE = 0.1
_PATIENCE = 3.0
# Who has been met is called for so long: on a busy machine an overlay loses a peer now and then, and finds it again.
_CALLING = 20.0
_SILENT = 20.0
_IP_HEADERS = 28
_SIZES = (576, 1000, 1200, 1280, 1350, 1370, 1400, 1420, 1450, 1480, 1500, 4000, 8000, 8950, 9000)
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # not in Python's socket module; Linux's own numbers
_MORE, _LAST = b"\1", b"\0"


@dataclass(frozen=True)
class Link:
    """What two nodes measured between them; `error` is why they could not, and the rest is then 0."""

    a: str
    b: str
    round_trip: float = 0.0
    """Seconds, the median of many."""
    there: float = 0.0
    """Bytes per second from a to b, by one TCP stream."""
    back: float = 0.0
    """Bytes per second from b to a."""
    packet: int = 0
    """Bytes of the largest IP packet of those tried that arrives whole, both ways."""
    error: str = ""


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return every pair of `names` once, in rounds of disjoint pairs: n-1 of them, or n if n is odd.

    The circle method of round-robin tournaments (Kirkman, 1847): one stays, the others move on by one place a round.
    """
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    made = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        made.append([(a, b) if names.index(a) < names.index(b) else (b, a) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return made


class Ends:
    """This node's ends of all its links: it listens for its peers from the start, and calls them when a round says so."""

    def __init__(self, name: str, port: int, mtu: int, bind: str = "", where: Mapping[str, str] | None = None) -> None:
        """Listen on TCP and UDP `port` of `bind`. `mtu` is that of the interface which leads to the peers.

        `where` is under which address or name each peer is found, where its own is not known. Raises OSError.
        """
        self.name, self._port, self._mtu, self._bind = name, port, mtu, bind
        self._where = where or {}
        self._addresses: dict[str, str] = {}
        self._callers: dict[str, socket.socket] = {}
        self._arrived = threading.Condition()
        self._datagrams: dict[str, set[int]] = {}
        self._server = socket.create_server((bind, port), backlog=64)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        self._udp.bind((bind, port))
        for serve in (self._accept, self._receive):
            threading.Thread(target=serve, daemon=True).start()

    def meet(self, peers: Sequence[str], seconds: float, silent: float = _SILENT) -> dict[str, float | None]:
        """Wait until all `peers` listen; return for each how long its name takes to be found, None where it never answered.

        Who has a name is there: one that has had it for `silent` seconds and does not answer is not waited for any longer.
        A name that is not there yet may keep a look-up busy for many seconds, so each peer is looked for by itself, and the
        time is that of a look-up once it is there.
        """
        end = time.monotonic() + seconds
        found: dict[str, float | None] = dict.fromkeys(peers)
        # Threads of their own and no pool: whoever is told to stop does not wait for them.
        greetings = [threading.Thread(target=self._greet, args=(peer, end, silent, found), daemon=True) for peer in peers]
        for greeting in greetings:
            greeting.start()
        for greeting in greetings:
            greeting.join()
        return found

    def _greet(self, peer: str, end: float, silent: float, found: dict[str, float | None]) -> None:
        named = False
        while time.monotonic() < end:
            try:
                address = socket.gethostbyname(self._where.get(peer, peer))
                if not named:
                    named, end = True, min(end, time.monotonic() + silent)
                with socket.create_connection((address, self._port), timeout=1.0) as greeting:
                    greeting.sendall(b"\n")
                self._addresses[peer] = address
                begun = time.monotonic()
                socket.gethostbyname(self._where.get(peer, peer))
                found[peer] = time.monotonic() - begun
                return
            except OSError:
                time.sleep(0.1)

    def measure(self, a: str, b: str, patience: float) -> Link:
        """Measure the link of this node and another; `patience` in seconds is how long the other may let it wait."""
        other = b if self.name == a else a
        if other not in self._addresses:
            return Link(a, b, error=f"{other} cannot be reached from {self.name}")
        try:
            line = self._call(b, patience) if self.name == a else self._called_by(a, patience)
            with line:
                return _as_caller(self, line, a, b) if self.name == a else _as_called(self, line, a, b)
        except (OSError, ValueError) as error:
            return Link(a, b, error=str(error) or type(error).__name__)

    def spray(self, address: str) -> None:
        """Send datagrams of many sizes, each of which may not be cut up on its way."""
        for size in sorted({size for size in (*_SIZES, self._mtu) if size <= self._mtu}):
            for _ in range(2):
                try:
                    self._udp.sendto(bytes(size - _IP_HEADERS), (address, self._port))
                except OSError:  # larger than the interface takes
                    break

    def arrived(self, address: str) -> set[int]:
        """Return the sizes of the packets that have come from `address`."""
        return set(self._datagrams.get(address, set()))

    def _call(self, peer: str, patience: float) -> socket.socket:
        """Return a line to `peer` once it has time for it."""
        try:
            line = self._line_to(self._addresses[peer])
            line.sendall(self.name.encode() + b"\n")
            line.settimeout(patience)
            _exactly(line, 1)
        except OSError as error:
            raise OSError(f"{peer} cannot be reached from {self.name}: {error}") from None
        return line

    def _line_to(self, address: str) -> socket.socket:
        end = time.monotonic() + _CALLING
        while True:
            try:
                return socket.create_connection((address, self._port), timeout=_PATIENCE, source_address=(self._bind, 0))
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _called_by(self, peer: str, patience: float) -> socket.socket:
        with self._arrived:
            if not self._arrived.wait_for(lambda: peer in self._callers, patience):
                raise OSError(f"{peer} did not call {self.name}")
            line = self._callers.pop(peer)
        line.sendall(_MORE)
        return line

    def _accept(self) -> None:
        while True:
            line, _ = self._server.accept()
            line.settimeout(_PATIENCE)
            try:
                name = _line(line).decode()
            except (OSError, ValueError):  # not a peer, or one that has gone again
                name = ""
            if not name:
                line.close()
                continue
            with self._arrived:
                self._callers[name] = line
                self._arrived.notify_all()

    def _receive(self) -> None:
        while True:
            content, (address, _) = self._udp.recvfrom(1 << 16)
            self._datagrams.setdefault(address, set()).add(len(content) + _IP_HEADERS)


def _as_caller(ends: Ends, line: socket.socket, a: str, b: str) -> Link:
    _prepare(line)
    trips: list[float] = []
    begun = time.monotonic()
    while len(trips) < _TRIPS and time.monotonic() - begun < _TRIPS_WITHIN:
        sent = time.perf_counter()
        line.sendall(_MORE)
        _exactly(line, 1)
        trips.append(time.perf_counter() - sent)
    line.sendall(_LAST)
    packet = _packets(ends, line)
    trip = statistics.median(trips)
    try:
        there = _send(line)
        back = _take(line)
        _tell(line, back)
    except OSError as error:  # small packets came through, so what is known is worth telling
        return Link(a, b, trip, packet=packet, error=f"data stops on its way: {error}")
    return Link(a, b, trip, there, back, packet)


def _as_called(ends: Ends, line: socket.socket, a: str, b: str) -> Link:
    _prepare(line)
    while _exactly(line, 1) == _MORE:
        line.sendall(_MORE)
    packet = _packets(ends, line)
    there = _take(line)
    _tell(line, there)
    back = _send(line)
    return Link(a, b, 0.0, there, back, packet)


def _prepare(line: socket.socket) -> None:
    line.settimeout(_PATIENCE)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)


def _packets(ends: Ends, line: socket.socket) -> int:
    """Let both ends send datagrams of many sizes; return the largest that went through both ways."""
    address = line.getpeername()[0]
    ends.spray(address)
    time.sleep(_DATAGRAMS_ARRIVE)
    _tell(line, sorted(ends.arrived(address)))
    theirs = set(_told(line))
    return max(theirs & ends.arrived(address), default=0)


def _send(line: socket.socket) -> float:
    """Send for a while; return the rate at which the other end took it."""
    chunk = _MORE + bytes(_CHUNK - 1)
    end = time.monotonic() + _STREAM
    while time.monotonic() < end:
        line.sendall(chunk)
    line.sendall(_LAST + bytes(_CHUNK - 1))
    return float(_told(line))


def _take(line: socket.socket) -> float:
    """Take what the other end sends until it says that it was all; return the rate, in bytes per second."""
    taken = 0
    last = _exactly(line, _CHUNK)[:1] == _LAST
    begun = time.monotonic()  # the first chunk starts the clock, and does not count
    while not last:
        last = _exactly(line, _CHUNK)[:1] == _LAST
        taken += _CHUNK
    return taken / max(time.monotonic() - begun, 1e-6)


def _tell(line: socket.socket, value: Any) -> None:
    line.sendall(json.dumps(value).encode() + b"\n")


def _told(line: socket.socket) -> Any:
    return json.loads(_line(line))


def _line(line: socket.socket) -> bytes:
    return b"".join(iter(lambda: _exactly(line, 1), b"\n"))


def _exactly(line: socket.socket, count: int) -> bytes:
    return b"".join(_pieces(line, count))


def _pieces(line: socket.socket, count: int) -> Iterator[bytes]:
    while count:
        piece = line.recv(count)
        if not piece:
            raise OSError("the other end has closed the connection")
        count -= len(piece)
        yield piece
