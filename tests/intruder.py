"""A client without the key of a run, which attacks the run's ports: unsigned, replayed and altered requests, and a pickle in the store.

As a program, it runs on a machine that reaches the ports: `intruder.py COORDINATOR STORE ROUND FILE`, with the key on standard input, which
it needs only to sign what a process of the run would sign.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from swarmtrain.lab import Lab
from swarmtrain.protocol import EVENT_FAILURE, PROTOCOL_VERSION
from swarmtrain.run_key import REQUEST_PURPOSE, RESPONSE_PURPOSE, build_signed_message, open_signed_message

REFUSAL = {"error": "the request is not signed with the run's key"}
ROOT = Path(__file__).parents[1]
PING = json.dumps({"op": "ping", "protocol": PROTOCOL_VERSION})
FATAL_FAILURE = json.dumps(
    {"op": "post", "protocol": PROTOCOL_VERSION, "kind": EVENT_FAILURE, "data": {"node": "node0", "error": "planted", "permanent": True}}
)


class _CodeInPickle:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._file}",)


class Intruder:
    """Client that reaches the coordinator and the store of a run, without its key."""

    def __init__(self, coordinator: str, store: str) -> None:
        self._coordinator, self._store = coordinator, store

    def send_unsigned_request(self) -> Any:
        """Request the end of the run, and return the response."""
        with self._connect() as stream:
            return json.loads(send_line(stream, FATAL_FAILURE.encode() + b"\n"))

    def replay_request(self, key: bytes) -> Any:
        """Send a request again that a process of the run has signed and sent, and return the response."""
        with self._connect() as stream:
            recorded = build_signed_message(key, REQUEST_PURPOSE, request_nonce(stream, key), PING)
            assert open_signed_message(key, RESPONSE_PURPOSE, send_line(stream, recorded))
        with self._connect() as stream:
            return json.loads(send_line(stream, recorded))

    def alter_request(self, key: bytes) -> Any:
        """Send a signed request whose body was changed on its way, and return the response."""
        with self._connect() as stream:
            signed = build_signed_message(key, REQUEST_PURPOSE, request_nonce(stream, key), PING)
            return json.loads(send_line(stream, signed.replace(PING.encode(), FATAL_FAILURE.encode())))

    def poison_store(self, round: str, file: Path) -> None:
        """Write to the store, as the state of torch's rendezvous, a pickle that creates `file` when it is loaded."""
        from torch.distributed import TCPStore

        host, _, port = self._store.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10))
        store.set(f"torch.rendezvous.{round}", base64.b64encode(pickle.dumps(_CodeInPickle(file))).decode())

    def attack(self, key: bytes, round: str, file: Path) -> None:
        """Try everything, and check that every request is refused."""
        for _ in range(3):
            assert self.send_unsigned_request() == REFUSAL
            assert self.replay_request(key) == REFUSAL
            assert self.alter_request(key) == REFUSAL
        self.poison_store(round, file)

    @contextmanager
    def _connect(self) -> Iterator[BufferedRWPair]:
        host, _, port = self._coordinator.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10.0) as connection, connection.makefile("rwb") as stream:
            yield stream


def request_nonce(stream: BufferedRWPair, key: bytes) -> str:
    return str(json.loads(send_line(stream, build_signed_message(key, REQUEST_PURPOSE, "", PING)))["nonce"])


def send_line(stream: BufferedRWPair, line: bytes) -> bytes:
    stream.write(line)
    stream.flush()
    return stream.readline()


def run_attack(lab: Lab, node: str, key: bytes, *arguments: str) -> None:
    """Run the attack on `node` of the lab with these command line arguments. Raises CalledProcessError if a request was not refused."""
    argv = [*lab.build_enter_command(node), "env", f"PYTHONPATH={ROOT}", sys.executable, __file__, *arguments]
    subprocess.run(argv, input=key, check=True, timeout=120)


if __name__ == "__main__":
    coordinator, store, round_name, file_name = sys.argv[1:]
    Intruder(coordinator, store).attack(sys.stdin.buffer.read(), round_name, Path(file_name))
