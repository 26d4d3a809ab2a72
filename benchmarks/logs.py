"""`logs --follow` of a hundred services that print ten thousand lines a second, through connections that are killed.

The engine is a stand-in that speaks the part of Docker's API that a follow uses: a real one on the same two cores would be
what is measured. Its lines are numbered, and the exact set of them is compared with what was printed.
"""

from __future__ import annotations

import json
import os
import socketserver
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.measure import SWARMTRAIN, Row, Sample, Unavailable, say
from swarmtrain import process, wire

_RUN = "hundred"
_STREAMS = 100
_RATE = 100
"""Lines a second of each stream."""
_SECONDS = 20
_KILLS = (5.0, 12.0)
_RUNS = 3
_TICK = 0.05


def hundred_streams() -> Iterator[Row]:
    """Cores in use, and lines that are lost or come twice."""
    cores, wrong = [], []
    for _ in range(_RUNS):
        used, bad = _follow()
        say(f"{used:.2f} cores, {bad} lines lost or twice")
        cores.append(used)
        wrong.append(float(bad))
    what = f"`swarmtrain logs --follow` of {_STREAMS} services, {_STREAMS * _RATE:,} lines a second in all"
    yield Row("logs-100", f"{what}: CPU time a second", "cores", Sample.of(cores), limit=1)
    total = _STREAMS * _RATE * _SECONDS
    note = f"all connections are killed {len(_KILLS)} times; each time the last minute is read again"
    yield Row(
        "logs-100/wrong", f"of {total:,} such lines, those that are lost or come twice", "lines", Sample.of(wrong), limit=0, note=note
    )


def _follow() -> tuple[float, int]:
    """Return the CPU seconds a second of one follow, and how many lines are not there exactly once."""
    with tempfile.TemporaryDirectory() as folder, StandIn(Path(folder) / "s") as engine:
        printed = Path(folder) / "printed"
        env = {"DOCKER_HOST": f"unix://{engine.path}", "XDG_STATE_HOME": folder}
        with printed.open("wb") as out:
            program = process.start([*SWARMTRAIN, "logs", "--follow", _RUN], env=env, stdout=out, stderr=subprocess.DEVNULL)
            for kill in _KILLS:
                time.sleep(max(0.0, engine.begun + kill - time.time()))
                engine.kill()
            _, status, used = os.wait4(program.pid, 0)
            program.returncode = os.waitstatus_to_exitcode(status)
        if program.returncode:
            raise Unavailable(f"swarmtrain logs ended with {program.returncode}")
        seen = Counter(printed.read_text().splitlines())
    wanted = {f"node{stream} rank {stream} | line {number}" for stream in range(_STREAMS) for number in range(_RATE * _SECONDS)}
    wrong = len(wanted - set(seen)) + sum(count - 1 for count in seen.values()) + len(set(seen) - wanted)
    return (used.ru_utime + used.ru_stime) / _SECONDS, wrong


class StandIn(socketserver.ThreadingUnixStreamServer):
    """An engine whose services print numbered lines for `_SECONDS` from now on, and then are gone."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, path: Path) -> None:
        self.path, self.begun = path, time.time() + 2
        self._open: set[Any] = set()
        self.generation = 0
        super().__init__(str(path), _Request)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def kill(self) -> None:
        """Break all connections off, in the middle of whatever they send."""
        self.generation += 1
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(2)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was killed is no error."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:  # http.server names it
        url = urlsplit(self.path)
        path, query = url.path.partition("/v1.")[2].partition("/")[2], parse_qs(url.query)
        if path.startswith("services/"):
            self._log(path.split("/")[1], query)
            return
        answers = {"services": self._services, "tasks": list, "nodes": list}
        found = answers[path]() if path in answers else {"ApiVersion": "1.41", "Version": "20.10"}
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        return "client"

    def _services(self) -> list[dict[str, Any]]:
        if time.time() > self.server.begun + _SECONDS + 3:
            return []
        names = {wire.RENDEZVOUS: wire.ROLE_RENDEZVOUS, **{f"node{number}": wire.ROLE_NODE for number in range(_STREAMS)}}
        return [{"ID": name, "Version": {"Index": 1}, "Spec": _spec(name, role)} for name, role in names.items()]

    def _log(self, name: str, query: dict[str, list[str]]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        stream = int(name.removeprefix("node")) if name.startswith("node") else None
        begun, follow = self.server.begun, "follow" in query
        number = max(0, int((float(query.get("since", ["0"])[0]) - begun) * _RATE))
        while stream is not None:
            due = min(_RATE * _SECONDS, max(0, int((time.time() - begun) * _RATE)))
            if data := b"".join(_frame(begun, stream, index) for index in range(number, due)):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            number = max(number, due)
            if not follow:
                break
            time.sleep(_TICK)
        while follow and stream is None:
            time.sleep(_TICK)
        self.wfile.write(b"0\r\n\r\n")


def _spec(name: str, role: str) -> dict[str, Any]:
    labels = {wire.LABEL_STACK: _RUN, wire.LABEL_RUN: _RUN, wire.LABEL_ROLE: role}
    return {"Name": f"{_RUN}_{name}", "Labels": labels, "Mode": {"Replicated": {"Replicas": 1}}, "TaskTemplate": {}}


def _frame(begun: float, stream: int, number: int) -> bytes:
    at = begun + (number + 0.5) / _RATE
    stamp = datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%S")
    details = f"com.docker.swarm.node.id=n,com.docker.swarm.service.id=node{stream},com.docker.swarm.task.id=t{stream}"
    line = f"{stamp}.{int(at % 1 * 1e9):09d}Z {details} [rank {stream}] line {number}\n".encode()
    return struct.pack(">BxxxL", 1, len(line)) + line
