"""The part of Determined's master that a trial talks to."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TRIAL = {"DET_TASK_TYPE": "TRIAL"}


class DeterminedMaster(ThreadingHTTPServer):
    """A master that answers a trial and records what the trial reports."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MasterHandler)
        self.preempt_event = threading.Event()
        self.is_silent = self.is_refusing = False
        self.preemption_answers = 0
        """Number of answered preemption polls."""
        self.acknowledgments = 0
        self.reported_metrics: list[dict[str, Any]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors: a killed trial does not read its response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def environ(self) -> dict[str, str]:
        address = f"http://127.0.0.1:{self.server_address[1]}"
        return TRIAL | {"DET_MASTER": address, "DET_SESSION_TOKEN": "hush", "DET_USER": "me", "DET_ALLOCATION_ID": "7.1"}


class MasterHandler(BaseHTTPRequestHandler):
    server: DeterminedMaster

    def do_GET(self) -> None:
        wait = re.fullmatch(r"/api/v1/allocations/7\.1/signals/preemption\?timeout_seconds=(\d+)", self.path)
        assert wait, self.path
        self.send_json({"preempt": self.server.preempt_event.wait(60 if self.server.is_silent else float(wait[1]))})
        self.server.preemption_answers += 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        assert self.headers["Grpc-Metadata-x-allocation-token"] == "Bearer hush"
        if self.path == "/api/v1/allocations/7.1/signals/ack_preemption":
            self.server.acknowledgments += 1
        elif self.path == "/api/v1/trials/7/metrics":
            self.server.reported_metrics.append({"group": body["group"], **body["metrics"]})
        else:
            assert self.path == "/api/v1/runs/start", self.path
        self.send_json({}, 500 if self.server.is_refusing and self.path != "/api/v1/runs/start" else 200)

    def send_json(self, answer: dict[str, Any], status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def run_master() -> Iterator[DeterminedMaster]:
    """Run a master on a free local port."""
    with DeterminedMaster() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.preempt_event.set()
        server.shutdown()
