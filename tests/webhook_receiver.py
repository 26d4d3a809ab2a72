"""A receiver of webhooks on this machine, which records requests, verifies their signatures, and can fail in several ways."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from swarmtrain.lab import Lab
from swarmtrain.lab.network import build_enter_command
from swarmtrain.lab.state import read_lab_description

_PORT = 18765  # docs/how-to/notify.md uses 8765
KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
URL_TOKEN = "token-in-the-path-5f0c"  # noqa: S105  # what no log may contain


@dataclass
class Receiver:
    """Requests that were received, in order. `statuses`: the next responses; after them, every response is 204."""

    server: ThreadingHTTPServer
    requests: list[dict[str, Any]] = field(default_factory=list)
    accepted: list[dict[str, Any]] = field(default_factory=list)
    """Requests that were answered with a status below 300."""
    statuses: list[int] = field(default_factory=list)
    delay: float = 0.0

    @property
    def url(self) -> str:
        host, port = self.server.server_address[:2]
        return f"http://{host!s}:{port}/{URL_TOKEN}"

    @property
    def accepted_ids(self) -> list[str]:
        return [request["id"] for request in self.accepted]

    def write_secret(self, path: Path) -> Path:
        """Write the secret file of a channel that posts to this receiver."""
        path.write_text(f"# the team's receiver\n{self.url}\n{KEY}\n")
        return path

    def wait_for_accepted(self, count: int, timeout: float = 30.0) -> list[dict[str, Any]]:
        end = time.monotonic() + timeout
        while len(self.accepted) < count:
            assert time.monotonic() < end, f"{len(self.accepted)} of {count} notifications: {self.requests}"
            time.sleep(0.02)
        return self.accepted


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver: Receiver = self.server.receiver  # type: ignore[attr-defined]  # set by receive_webhooks
        body = self.rfile.read(int(self.headers["content-length"]))
        request = {
            "id": self.headers["webhook-id"],
            "path": self.path,
            "time": time.time(),
            "is_signed": "webhook-id" in self.headers and verify_signature(dict(self.headers.items()), body),
            "body": json.loads(body),
        }
        receiver.requests.append(request)
        time.sleep(receiver.delay)
        status = receiver.statuses.pop(0) if receiver.statuses else 204
        if status < 300:
            receiver.accepted.append(request)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", f"{receiver.url}/elsewhere")
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def verify_signature(headers: dict[str, str], body: bytes) -> bool:
    """Return whether the headers have a signature of `body` as Standard Webhooks specifies it, with a timestamp of the last 5 min."""
    values = {name.lower(): value for name, value in headers.items()}
    signed = f"{values['webhook-id']}.{values['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(base64.b64decode(KEY.removeprefix("whsec_")), signed, hashlib.sha256).digest()).decode()
    is_recent = abs(time.time() - int(values["webhook-timestamp"])) < 300
    return is_recent and f"v1,{expected}" in values["webhook-signature"].split()


@contextlib.contextmanager
def receive_webhooks(address: str = "127.0.0.1", port: int = 0) -> Iterator[Receiver]:
    """Serve a receiver, by default on loopback."""
    server = ThreadingHTTPServer((address, port), _Handler)
    server.daemon_threads = True
    receiver = Receiver(server)
    server.receiver = receiver  # type: ignore[attr-defined]  # for the handler
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


def read_process_arguments(pid: int) -> str:
    """Return the command line and the environment of a process, as text."""
    folder = Path("/proc") / str(pid)
    return "\n".join((folder / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ"))


class ReceiverProcess:
    """A receiver in a process of its own, which `prefix` may put into another network namespace. Each request takes `delay` seconds."""

    def __init__(self, folder: Path, address: str, *, prefix: Sequence[str] = (), delay: float = 0.0) -> None:
        self.url = f"http://{address}:{_PORT}/{URL_TOKEN}"
        self.secret = f"{self.url}\n{KEY}\n"
        """Content of the secret file of a channel that posts to this receiver."""
        self._output = folder / "requests.jsonl"
        self._output.write_text("")
        argv = [*prefix, sys.executable, "-m", "tests.webhook_receiver", address, str(_PORT), str(delay), str(self._output)]
        self._process = subprocess.Popen(argv, cwd=Path(__file__).parents[1])

    def read_requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._output.read_text().splitlines()]

    def wait_for_requests(self, count: int, seconds: float = 120.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while len(found := self.read_requests()) < count:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def start_lab_receiver(lab: Lab, folder: Path, delay: float = 0.0) -> ReceiverProcess:
    """Start a receiver at the address of the lab's bridge, which all machines of the lab reach."""
    description = read_lab_description(lab.directory)
    assert description
    return ReceiverProcess(folder, description.bridge_address, prefix=build_enter_command(lab.name, "bridge"), delay=delay)


def main() -> None:
    """Serve a receiver at ADDRESS:PORT that takes DELAY seconds, and append each request to FILE when it arrives, as a line of JSON."""
    address, port, delay, file = sys.argv[1:]
    with receive_webhooks(address, int(port)) as receiver, Path(file).open("a", encoding="utf-8") as output:
        receiver.delay = float(delay)
        written = 0
        while True:
            for request in receiver.requests[written:]:
                output.write(json.dumps(request) + "\n")
                output.flush()
                written += 1
            time.sleep(0.02)


if __name__ == "__main__":
    main()
