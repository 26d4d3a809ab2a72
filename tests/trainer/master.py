"""What of Determined's master a trial talks to."""

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


class Master(ThreadingHTTPServer):
    """Answers a trial, and keeps what it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.preempts = threading.Event()
        self.silent = self.refuses = False
        self.answers = 0
        """To the question whether to make room."""
        self.acknowledged = 0
        self.reported: list[dict[str, Any]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A trial that was killed takes no answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def environ(self) -> dict[str, str]:
        address = f"http://127.0.0.1:{self.server_address[1]}"
        return TRIAL | {"DET_MASTER": address, "DET_SESSION_TOKEN": "hush", "DET_USER": "me", "DET_ALLOCATION_ID": "7.1"}


class Answer(BaseHTTPRequestHandler):
    server: Master

    def do_GET(self) -> None:
        wait = re.fullmatch(r"/api/v1/allocations/7\.1/signals/preemption\?timeout_seconds=(\d+)", self.path)
        assert wait, self.path
        self.say({"preempt": self.server.preempts.wait(60 if self.server.silent else float(wait[1]))})
        self.server.answers += 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        assert self.headers["Grpc-Metadata-x-allocation-token"] == "Bearer hush"
        if self.path == "/api/v1/allocations/7.1/signals/ack_preemption":
            self.server.acknowledged += 1
        elif self.path == "/api/v1/trials/7/metrics":
            self.server.reported.append({"group": body["group"], **body["metrics"]})
        else:
            assert self.path == "/api/v1/runs/start", self.path
        self.say({}, 500 if self.server.refuses and self.path != "/api/v1/runs/start" else 200)

    def say(self, answer: dict[str, Any], status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering() -> Iterator[Master]:
    """Run a master of one's own."""
    with Master() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.preempts.set()
        server.shutdown()
