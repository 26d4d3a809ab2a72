"""Benchmark of `logs --follow` of 100 services that print 10,000 lines per second in total, over connections that are killed.

A fake engine implements the endpoints of Docker's API that `logs --follow` uses: a real engine on the same two cores would dominate the
measurement. Its log lines are numbered, so that lost and duplicated lines can be counted in the output.
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

from benchmarks.measurement import SWARMTRAIN_ARGV, BenchmarkRow, BenchmarkUnavailableError, Sample, print_progress
from swarmtrain import process, protocol

_RUN_NAME = "hundred"
_STREAM_COUNT = 100
_LINES_PER_SECOND = 100
"""Lines per second of each stream."""
_SECONDS = 20
_KILL_TIMES_SECONDS = (5.0, 12.0)
_REPEATS = 3
_TICK_SECONDS = 0.05


def measure_log_streams() -> Iterator[BenchmarkRow]:
    """Measure the CPU time per second of `logs --follow`, in cores, and count the lines that are lost or duplicated."""
    cores, wrong_line_counts = [], []
    for _ in range(_REPEATS):
        cores_used, wrong_lines = _measure_logs_command()
        print_progress(f"{cores_used:.2f} cores, {wrong_lines} lines lost or duplicated")
        cores.append(cores_used)
        wrong_line_counts.append(float(wrong_lines))
    description = f"`swarmtrain logs --follow` of {_STREAM_COUNT} services, {_STREAM_COUNT * _LINES_PER_SECOND:,} lines per second in total"
    yield BenchmarkRow("logs-100", f"{description}: CPU time per second", "cores", Sample.from_values(cores), limit=1)
    total = _STREAM_COUNT * _LINES_PER_SECOND * _SECONDS
    note = f"all connections are killed {len(_KILL_TIMES_SECONDS)} times; each time the last minute is read again"
    yield BenchmarkRow(
        "logs-100/wrong",
        f"of {total:,} such lines, the number that is lost or duplicated",
        "lines",
        Sample.from_values(wrong_line_counts),
        limit=0,
        note=note,
    )


def _measure_logs_command() -> tuple[float, int]:
    """Run `logs --follow` once. Return its CPU seconds per second, and the number of lines that do not appear exactly once."""
    with tempfile.TemporaryDirectory() as folder, FakeEngine(Path(folder) / "s") as engine:
        printed = Path(folder) / "printed"
        env = {"DOCKER_HOST": f"unix://{engine.path}", "XDG_STATE_HOME": folder}
        with printed.open("wb") as out:
            program = process.start_process(
                [*SWARMTRAIN_ARGV, "logs", "--follow", _RUN_NAME], env=env, stdout=out, stderr=subprocess.DEVNULL
            )
            for kill_time in _KILL_TIMES_SECONDS:
                time.sleep(max(0.0, engine.started_at + kill_time - time.time()))
                engine.kill_connections()
            _, status, resource_usage = os.wait4(program.pid, 0)
            program.returncode = os.waitstatus_to_exitcode(status)
        if program.returncode:
            raise BenchmarkUnavailableError(f"swarmtrain logs exited with code {program.returncode}")
        printed_lines = Counter(printed.read_text().splitlines())
    expected_lines = {
        f"node{stream} rank {stream} | line {number}" for stream in range(_STREAM_COUNT) for number in range(_LINES_PER_SECOND * _SECONDS)
    }
    wrong_lines = (
        len(expected_lines - set(printed_lines))
        + sum(count - 1 for count in printed_lines.values())
        + len(set(printed_lines) - expected_lines)
    )
    return (resource_usage.ru_utime + resource_usage.ru_stime) / _SECONDS, wrong_lines


class FakeEngine(socketserver.ThreadingUnixStreamServer):
    """Fake Docker engine whose services print numbered lines for _SECONDS after its start, and are then removed."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, socket_path: Path) -> None:
        self.path, self.started_at = socket_path, time.time() + 2
        self._open_connections: set[Any] = set()
        self.generation = 0
        super().__init__(str(socket_path), _FakeEngineHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def kill_connections(self) -> None:
        """Shut down all open connections, even in the middle of a response."""
        self.generation += 1
        for connection in list(self._open_connections):
            with suppress(OSError):
                connection.shutdown(2)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open_connections.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: killed connections are expected."""


class _FakeEngineHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeEngine

    def do_GET(self) -> None:  # the name is defined by http.server
        url = urlsplit(self.path)
        path, query = url.path.partition("/v1.")[2].partition("/")[2], parse_qs(url.query)
        if path.startswith("services/"):
            self._stream_log(path.split("/")[1], query)
            return
        answers = {"services": self._build_services, "tasks": list, "nodes": list}
        answer = answers[path]() if path in answers else {"ApiVersion": "1.41", "Version": "20.10"}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def address_string(self) -> str:
        return "client"

    def _build_services(self) -> list[dict[str, Any]]:
        if time.time() > self.server.started_at + _SECONDS + 3:
            return []
        names = {
            protocol.RENDEZVOUS_SERVICE: protocol.ROLE_RENDEZVOUS,
            **{f"node{number}": protocol.ROLE_NODE for number in range(_STREAM_COUNT)},
        }
        return [{"ID": name, "Version": {"Index": 1}, "Spec": _build_service_spec(name, role)} for name, role in names.items()]

    def _stream_log(self, service_name: str, query: dict[str, list[str]]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        stream = int(service_name.removeprefix("node")) if service_name.startswith("node") else None
        started_at, follow = self.server.started_at, "follow" in query
        number = max(0, int((float(query.get("since", ["0"])[0]) - started_at) * _LINES_PER_SECOND))
        while stream is not None:
            due_lines = min(_LINES_PER_SECOND * _SECONDS, max(0, int((time.time() - started_at) * _LINES_PER_SECOND)))
            if data := b"".join(_build_log_frame(started_at, stream, index) for index in range(number, due_lines)):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            number = max(number, due_lines)
            if not follow:
                break
            time.sleep(_TICK_SECONDS)
        while follow and stream is None:
            time.sleep(_TICK_SECONDS)
        self.wfile.write(b"0\r\n\r\n")


def _build_service_spec(name: str, role: str) -> dict[str, Any]:
    labels = {protocol.LABEL_STACK: _RUN_NAME, protocol.LABEL_RUN: _RUN_NAME, protocol.LABEL_ROLE: role}
    return {"Name": f"{_RUN_NAME}_{name}", "Labels": labels, "Mode": {"Replicated": {"Replicas": 1}}, "TaskTemplate": {}}


def _build_log_frame(started_at: float, stream_number: int, line_number: int) -> bytes:
    line_time = started_at + (line_number + 0.5) / _LINES_PER_SECOND
    stamp = datetime.fromtimestamp(int(line_time), UTC).strftime("%Y-%m-%dT%H:%M:%S")
    details = f"com.docker.swarm.node.id=n,com.docker.swarm.service.id=node{stream_number},com.docker.swarm.task.id=t{stream_number}"
    line = f"{stamp}.{int(line_time % 1 * 1e9):09d}Z {details} [rank {stream_number}] line {line_number}\n".encode()
    return struct.pack(">BxxxL", 1, len(line)) + line
