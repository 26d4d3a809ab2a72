"""A client without the key of a run, which attacks the coordinator's port: it must change nothing, and cost little.

As a program, it runs on a machine that reaches the port: `intruder.py COORDINATOR SECONDS`, with the key on standard input, which it needs
only to sign what a process of the run would sign. It prints how often it has tried each attack, as JSON.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.lab import Lab
from swarmtrain.protocol import EVENT_FAILURE, EVENT_OUTCOME, EVENT_WORLD_FORMED, PROTOCOL_VERSION, Event
from swarmtrain.protocol.run_key import REQUEST_PURPOSE, RESPONSE_PURPOSE, build_signed_message, open_signed_message

REFUSAL = {"error": "the request is not signed with the run's key"}
ROOT = Path(__file__).parents[1]
PING = json.dumps({"op": "ping", "protocol": PROTOCOL_VERSION})
FATAL_FAILURE = json.dumps(
    {"op": "post", "protocol": PROTOCOL_VERSION, "kind": EVENT_FAILURE, "data": {"node": "node0", "error": "planted", "permanent": True}}
)
FALSE_LEADER = json.dumps(
    {"op": "store", "protocol": PROTOCOL_VERSION, "round": "b-1", "command": "set", "key": "MASTER_ADDR", "value": "192.0.2.1"}
)
# What a client of a TCPStore sends first, and the store answers with the same number (VALIDATE and PING in torch's TCPStoreBackend.hpp).
GREETING = struct.pack("=BI", 0, 0x3C85F7CE) + struct.pack("=BI", 13, 42)
STORE_ANSWER = struct.pack("=I", 42).hex()
GREETING_PROGRAM = """
import json, os, socket, sys
os.setuid(int(sys.argv[1]))
answers = []
for host, port in json.loads(sys.argv[2]):
    connection = socket.socket()
    connection.settimeout(2)
    try:
        connection.connect((host, port))
        connection.send(bytes.fromhex(sys.argv[3]))
        answers.append(connection.recv(4).hex())
    except OSError as error:
        answers.append(type(error).__name__)
    connection.close()
print(json.dumps(answers))
"""
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s
_RESETS, _HELD_CONNECTIONS = 50, 20


class Intruder:
    """Client that reaches the coordinator of a run, without its key."""

    def __init__(self, coordinator: str) -> None:
        host, _, port = coordinator.rpartition(":")
        self._address = host, int(port)

    def send_unsigned_request(self, request: str) -> Any:
        """Send `request` without a signature, and return the response."""
        with self._open_stream() as stream:
            return json.loads(send_line(stream, request.encode() + b"\n"))

    def replay_request(self, key: bytes) -> Any:
        """Send a request again that a process of the run has signed and sent, and return the response."""
        with self._open_stream() as stream:
            recorded = build_signed_message(key, REQUEST_PURPOSE, request_nonce(stream, key), PING)
            assert open_signed_message(key, RESPONSE_PURPOSE, send_line(stream, recorded))
        with self._open_stream() as stream:
            return json.loads(send_line(stream, recorded))

    def alter_request(self, key: bytes) -> Any:
        """Send a signed request whose body was changed on its way, and return the response."""
        with self._open_stream() as stream:
            signed = build_signed_message(key, REQUEST_PURPOSE, request_nonce(stream, key), PING)
            return json.loads(send_line(stream, signed.replace(PING.encode(), FATAL_FAILURE.encode())))

    def request_nonce(self, key: bytes) -> str:
        """Request a nonce, and disconnect."""
        with self._open_stream() as stream:
            return request_nonce(stream, key)

    def send_long_line(self) -> Any:
        """Send a line that is longer than an unverified client may send, without its end, and return the response."""
        with self._open_stream() as stream:
            return json.loads(send_line(stream, b"x" * 5000))

    def reset_connections(self, count: int) -> None:
        """Open connections, send a byte, and reset them."""
        for _ in range(count):
            with self.connect() as connection:
                connection.send(b"x")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)

    def open_tcp_store(self) -> None:
        """Write to the port as a client of torch's TCPStore does. Raises RuntimeError if nobody serves such a store there."""
        from torch.distributed import TCPStore

        TCPStore(*self._address, is_master=False, timeout=timedelta(seconds=3)).set("MASTER_ADDR", "192.0.2.1")

    def wait_until_reachable(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                self.connect().close()
                return
            except OSError:
                assert time.monotonic() < end, self._address
                time.sleep(0.1)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=10.0)

    def attack(self, key: bytes, seconds: float) -> dict[str, int]:
        """Try everything for so many seconds, check that every request is refused, and return the number of attempts of each kind."""
        self.wait_until_reachable(120)
        with pytest.raises(RuntimeError):
            self.open_tcp_store()
        counts: Counter[str] = Counter()
        held: list[socket.socket] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.send_unsigned_request(FATAL_FAILURE) == REFUSAL
            assert self.send_unsigned_request(FALSE_LEADER) == REFUSAL
            assert self.replay_request(key) == REFUSAL
            assert self.alter_request(key) == REFUSAL
            assert self.send_long_line() == REFUSAL
            self.reset_connections(_RESETS)
            if len(held) < 400:
                held += [self.connect() for _ in range(_HELD_CONNECTIONS)]
            for connection in held:
                with suppress(OSError):  # the coordinator has closed it
                    connection.send(b"x")
            counts.update(unsigned=2, replayed=1, altered=1, long=1, reset=_RESETS, held=len(held))
            time.sleep(0.2)
        for connection in held:
            connection.close()
        return dict(counts)

    @contextmanager
    def _open_stream(self) -> Iterator[BufferedRWPair]:
        with self.connect() as connection, connection.makefile("rwb") as stream:
            yield stream


def greet_stores(addresses: Sequence[tuple[str, int]], *, user: int, enter: Sequence[str] = ()) -> list[str]:
    """Greet a TCPStore at each address, as a program of `user` on this machine, or where the command `enter` runs one.

    Return what the program receives from each: bytes as hexadecimal, or the name of an error.
    """
    argv = [*enter, sys.executable, "-c", GREETING_PROGRAM, str(user), json.dumps(addresses), GREETING.hex()]
    answers: list[str] = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    return answers


def list_listeners(enter: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Return the addresses on which programs listen on this machine, or where the command `enter` runs one."""
    lines = subprocess.run([*enter, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    addresses = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    return [(socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)), int(port, 16)) for host, port in addresses]


def request_nonce(stream: BufferedRWPair, key: bytes) -> str:
    return str(json.loads(send_line(stream, build_signed_message(key, REQUEST_PURPOSE, "", "")))["nonce"])


def send_line(stream: BufferedRWPair, line: bytes) -> bytes:
    stream.write(line)
    stream.flush()
    return stream.readline()


@contextmanager
def attack_from(lab: Lab, node: str, key: bytes, coordinator: str, seconds: float) -> Iterator[None]:
    """Context manager that attacks `coordinator` from `node` of the lab for so many seconds, from its start.

    At the end of the block, wait for the end of the attack, and check that it succeeded in nothing.
    """
    argv = [*lab.build_enter_command(node), "env", f"PYTHONPATH={ROOT}", sys.executable, __file__, coordinator, str(seconds)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        process.stdin.write(key)
        process.stdin.close()
        process.stdin = None
        yield
        output, errors = process.communicate(timeout=seconds + 60)
    assert process.returncode == 0, errors.decode()
    assert json.loads(output)["held"], output


def assert_run_is_undisturbed(events: Sequence[Event]) -> None:
    """Check that the events of a run under attack show one world, no failure, and few lines about the attack."""
    kinds = [event.kind for event in events]
    transcript = "\n".join(event.to_line() for event in events)
    assert (kinds.count(EVENT_WORLD_FORMED), kinds.count(EVENT_FAILURE), kinds.count(EVENT_OUTCOME)) == (1, 0, 0), transcript
    reports = [event for event in events if "not signed with the run's key" in str(event.data.get("message"))]
    assert 1 <= len(reports) <= 3, "the attack takes less than 2 min"


if __name__ == "__main__":
    print(json.dumps(Intruder(sys.argv[1]).attack(sys.stdin.buffer.read(), float(sys.argv[2]))))
