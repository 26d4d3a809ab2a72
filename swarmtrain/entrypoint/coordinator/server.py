"""The rendezvous role: hosts the c10d store and the coordinator; one process per run, on any node.

Prints each event as one JSON line on standard output, and nothing else: launchers read that log.
Exit codes: 0 if the run has an outcome and all nodes have received it, 143 if the process was stopped before that (so that Swarm restarts
it), 1 if its port is in use or its environment is invalid.
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

from swarmtrain.entrypoint import supervisor_watchdog
from swarmtrain.entrypoint.coordinator.rescue import RescueArbiter
from swarmtrain.entrypoint.coordinator.state_machine import Coordinator
from swarmtrain.errors import EXIT_ERROR
from swarmtrain.protocol import EVENT_FAILURE, PROTOCOL_VERSION, RENDEZVOUS_SERVICE, CoordinatorEnv, Event

_MAX_REQUEST_BYTES = 1 << 20
_CLIENT_TIMEOUT_SECONDS = 10.0
_TICK_SECONDS = 0.2
_PORT_HINT = "stop the process that listens there, or set runner.master_port to a free port whose next port is free too"
_EXIT_STOP_REQUESTED = 128 + signal.SIGTERM


def main() -> int:
    """Serve the c10d store and the coordinator until the run is over, and return the exit code."""
    try:
        env = CoordinatorEnv.from_env(os.environ)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\nhint: the image and the launcher must have the same version of swarmtrain\n")
        return EXIT_ERROR
    supervisor_watchdog.start_heartbeat_watchdog()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as set by the process that started it, see launchers.slurm.node_task
            signal.signal(number, lambda *_: stop.set())
    boot_id = f"{int(time.time()):x}{secrets.token_hex(2)}"
    coordinator = Coordinator(
        run=env.run,
        max_restarts=env.max_restarts,
        max_restarts_per_hour=env.max_restarts_per_hour,
        min_nodes=env.min_nodes,
        boot_id=boot_id,
        clock=time.monotonic,
        publish_event=_print_event,
    )
    try:
        bound_server = CoordinatorServer((env.bind, env.coordinator_port), coordinator)
    except OSError as error:
        sys.stderr.write(f"error: coordinator at {env.bind}:{env.coordinator_port}: {_format_socket_error(error)}\nhint: {_PORT_HINT}\n")
        return EXIT_ERROR
    with bound_server as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _TICK_SECONDS}, daemon=True).start()
        store = _serve_c10d_store(env, server)
        is_finished = _wait_until_run_finished(server, stop)
        server.shutdown()
    del store
    return 0 if is_finished else _EXIT_STOP_REQUESTED


class CoordinatorServer(socketserver.ThreadingTCPServer):
    """Serves swarmtrain.coordinator_client.CoordinatorClient: one request and one response, each a JSON line, per connection."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._rescue_arbiter = RescueArbiter(time.monotonic)
        self._lock = threading.Lock()
        super().__init__(address, _RequestHandler)

    def dispatch_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle the JSON object `request` and return the response. Raises ValueError, KeyError or TypeError if it is malformed."""
        with self._lock:
            match request.pop("op"):
                case "ping":
                    return {"time": time.time(), "monotonic": time.monotonic()}
                case "post":
                    event = Event(request["kind"], request["data"])
                    self._rescue_arbiter.record_dead_rank(event)
                    return asdict(self._coordinator.handle_event(event))
                case "join" | "beat" as op:
                    record_node = self._coordinator.register_node if op == "join" else self._coordinator.record_heartbeat
                    return asdict(record_node(request["node"]))
                case "close":
                    return asdict(self._coordinator.close_round(request["node"], request["round"]))
                case "leave":
                    return asdict(self._coordinator.record_node_exit(request["node"], int(request["exit_code"])))
                case "report_surviving_rank" | "rescue_finished" | "rescue_pending" | "generation" as op:
                    return self._rescue_arbiter.handle_request(op, request)
                case op:
                    raise ValueError(f"unknown operation: {op}")

    def process_timeouts(self) -> bool:
        """Process the coordinator's timeouts. Return whether the coordinator can exit."""
        with self._lock:
            self._coordinator.process_timeouts()
            return self._coordinator.is_finished


class _RequestHandler(socketserver.StreamRequestHandler):
    timeout = _CLIENT_TIMEOUT_SECONDS
    server: CoordinatorServer

    def handle(self) -> None:
        try:
            request = json.loads(self.rfile.readline(_MAX_REQUEST_BYTES))
            if (version := request.pop("protocol", None)) == PROTOCOL_VERSION:
                response = self.server.dispatch_request(request)
            else:
                response = {"protocol": PROTOCOL_VERSION, "error": f"the request uses protocol {version}, not {PROTOCOL_VERSION}"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            response = {"error": f"{type(error).__name__}: {error}"}
        self.wfile.write(json.dumps(response).encode() + b"\n")


def _wait_until_run_finished(server: CoordinatorServer, stop_event: threading.Event) -> bool:
    while not stop_event.is_set():
        if server.process_timeouts():
            return True
        stop_event.wait(_TICK_SECONDS)
    return False


def _serve_c10d_store(env: CoordinatorEnv, server: CoordinatorServer) -> object:
    """Serve the c10d store at the same address as the coordinator, and return it. If this fails, the run fails; return None."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise torch warns about each client whose address has no host name
    try:
        from torch.distributed import TCPStore

        # By default TCPStore listens on every interface, and it has no authentication.
        listener = socket.create_server((env.bind, env.store_port), backlog=1024)
        host = "127.0.0.1" if env.bind == "0.0.0.0" else env.bind  # noqa: S104  # compared, not bound
        port, fd = listener.getsockname()[1], listener.detach()
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)
    except (ImportError, OSError, RuntimeError) as error:
        hint = "the image needs torch 2.11 or newer" if isinstance(error, ImportError) else _PORT_HINT
        reason = _format_socket_error(error) if isinstance(error, OSError) else str(error)
        facts = {"node": RENDEZVOUS_SERVICE, "error": f"store at {env.bind}:{env.store_port}: cannot be served: {reason}", "hint": hint}
        data = {**facts, "exit_code": EXIT_ERROR, "permanent": True, "traceback": traceback.format_exc()}
        server.dispatch_request({"op": "post", "kind": EVENT_FAILURE, "data": data})
        sys.stderr.write(f"error: {facts['error']}\nhint: {hint}\n")
        return None


def _format_socket_error(error: OSError) -> str:
    return "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)


def _print_event(event: Event) -> None:
    sys.stdout.write(event.to_line() + "\n")
    sys.stdout.flush()
