"""The rendezvous role: holds the c10d store and serves the notice board; once a run, on a node of its own choosing.

Prints each event as one line of JSON, and nothing else, on standard output: that log is what launchers read.
Exit codes: 0 the verdict is given and everybody has heard it, 143 told to stop before (so that Swarm starts it again),
1 its port is taken, or it was told nothing that it understands.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import socketserver
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import Any

from swarmtrain.entrypoint import liveness
from swarmtrain.entrypoint.notices import Notices
from swarmtrain.entrypoint.rescues import Rescues
from swarmtrain.errors import EXIT_ERROR
from swarmtrain.wire import FAILURE, RENDEZVOUS, BoardEnv, Event

_REQUEST_LIMIT = 1 << 20
_CALLER_TIMEOUT = 10.0
_TICK = 0.2
_OTHER_PORT = "end what listens there, or choose another: runner.master_port, and the one after it"
_TOLD_TO_STOP = 128 + signal.SIGTERM


def main() -> int:
    """Serve until the run is over, and return the exit code."""
    try:
        env = BoardEnv.from_env(os.environ)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\nhint: the image and whoever started it must have the same version of swarmtrain\n")
        return EXIT_ERROR
    liveness.guard()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as whoever started it has asked, see launchers.slurm.node
            signal.signal(number, lambda *_: stop.set())
    boot = f"{int(time.time()):x}{secrets.token_hex(2)}"
    notices = Notices(
        run=env.run,
        max_restarts=env.max_restarts,
        max_restarts_per_hour=env.max_restarts_per_hour,
        min_nodes=env.min_nodes,
        boot=boot,
        now=time.monotonic,
        publish=_print,
    )
    try:
        opened = BoardServer((env.bind, env.board_port), notices)
    except OSError as error:
        sys.stderr.write(f"error: notice board at {env.bind}:{env.board_port}: {_reason(error)}\nhint: {_OTHER_PORT}\n")
        return EXIT_ERROR
    with opened as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _TICK}, daemon=True).start()
        store = _open_store(env, server)
        ended = _wait(server, stop)
        server.shutdown()
    del store
    return 0 if ended else _TOLD_TO_STOP


class BoardServer(socketserver.ThreadingTCPServer):
    """Answers the calls of swarmtrain.board.Board: one JSON line in, one JSON line out, per connection."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], notices: Notices) -> None:
        self._notices = notices
        self._rescues = Rescues(time.monotonic)
        self._lock = threading.Lock()
        super().__init__(address, _Caller)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what `request` asks. Raises ValueError, KeyError or TypeError if it makes no sense."""
        with self._lock:
            match request.pop("op"):
                case "ping":
                    return {"time": time.time(), "monotonic": time.monotonic()}
                case "post":
                    event = Event(request["kind"], request["data"])
                    self._rescues.hear(event)
                    return asdict(self._notices.post(event))
                case "join" | "beat" as op:
                    here = self._notices.join if op == "join" else self._notices.beat
                    return asdict(here(request["node"]))
                case "close":
                    return asdict(self._notices.close(request["node"], request["round"]))
                case "leave":
                    return asdict(self._notices.leave(request["node"], int(request["exit_code"])))
                case "stand" | "rescued" | "rescuing" | "token" as op:
                    return self._rescues.answer(op, request)
                case op:
                    raise ValueError(f"no such operation: {op}")

    def tick(self) -> bool:
        """Let time pass; return whether the board has nothing left to do."""
        with self._lock:
            self._notices.tick()
            return self._notices.ended


class _Caller(socketserver.StreamRequestHandler):
    timeout = _CALLER_TIMEOUT
    server: BoardServer

    def handle(self) -> None:
        try:
            answer = self.server.answer(json.loads(self.rfile.readline(_REQUEST_LIMIT)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def _wait(server: BoardServer, stop: threading.Event) -> bool:
    while not stop.is_set():
        if server.tick():
            return True
        stop.wait(_TICK)
    return False


def _open_store(env: BoardEnv, server: BoardServer) -> object:
    """Serve the store, bound to the same address as the board. One that cannot be served is the end of the run."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns of each client whose address has no name
    try:
        from torch.distributed import TCPStore

        # TCPStore by itself listens on every interface, and it has no authentication.
        listener = socket.create_server((env.bind, env.store_port), backlog=1024)
        host = "127.0.0.1" if env.bind == "0.0.0.0" else env.bind  # noqa: S104  # compared, not bound
        port, fd = listener.getsockname()[1], listener.detach()
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)
    except (ImportError, OSError, RuntimeError) as error:
        hint = "the image needs torch 2.11 or newer" if isinstance(error, ImportError) else _OTHER_PORT
        reason = _reason(error) if isinstance(error, OSError) else str(error)
        facts = {"node": RENDEZVOUS, "error": f"store at {env.bind}:{env.store_port}: cannot be served: {reason}", "hint": hint}
        data = {**facts, "exit_code": EXIT_ERROR, "permanent": True, "traceback": traceback.format_exc()}
        server.answer({"op": "post", "kind": FAILURE, "data": data})
        sys.stderr.write(f"error: {facts['error']}\nhint: {hint}\n")
        return None


def _reason(error: OSError) -> str:
    return "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)


def _print(event: Event) -> None:
    sys.stdout.write(event.to_line() + "\n")
    sys.stdout.flush()
