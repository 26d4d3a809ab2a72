"""The rendezvous role: hosts the c10d store and the coordinator; one process per run, on any node.

Prints each event as one JSON line on standard output, and nothing else: launchers read that log.
Exit codes: 0 if the run has an outcome and all nodes have received it, 143 if the process was stopped before that (so that Swarm restarts
it), 1 if its port is in use or its environment is invalid.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import asdict, replace
from typing import Any

from swarmtrain.entrypoint import supervisor_watchdog
from swarmtrain.entrypoint.coordinator.notifier import Notifier
from swarmtrain.entrypoint.coordinator.rendezvous_states import RendezvousStates
from swarmtrain.entrypoint.coordinator.rescue import RescueArbiter
from swarmtrain.entrypoint.coordinator.state_machine import Coordinator
from swarmtrain.errors import EXIT_ERROR, EXIT_OK, CoordinatorError
from swarmtrain.notifications.channel import decode_channels
from swarmtrain.protocol import (
    ENV_NOTIFY,
    EVENT_FAILURE,
    EVENT_NOTE,
    EXIT_PLANNED,
    NOTIFICATIONS_FIELD,
    OUTCOME_FIELD,
    PROTOCOL_VERSION,
    RENDEZVOUS_SERVICE,
    RUN_OVER_FIELD,
    CoordinatorEnv,
    Event,
    RunOutcome,
    SupervisorResponse,
)
from swarmtrain.queue_stop import QueueStop
from swarmtrain.run_key import (
    NEXT_NONCE_FIELD,
    REQUEST_PURPOSE,
    RESPONSE_PURPOSE,
    IssuedNonces,
    build_signed_message,
    load_run_key,
    open_signed_message,
)

_MAX_REQUEST_BYTES = 1 << 20
_CLIENT_TIMEOUT_SECONDS = 10.0
_TICK_SECONDS = 0.2
_RELEASE_SECONDS = 10.0
"""Maximum seconds for which the coordinator waits until nodes that remain have learned that the run is over."""
_MAX_REPORTED_INTRUDERS = 10
_PORT_HINT = "stop the process that listens there, or set runner.master_port to a free port whose next port is free too"
_EXIT_STOP_REQUESTED = 128 + signal.SIGTERM


def main() -> int:
    """Serve the c10d store and the coordinator until the run is over, and return the exit code."""
    boot_id = f"{int(time.time()):x}{secrets.token_hex(2)}"
    try:
        env = CoordinatorEnv.from_env(os.environ)
        notifier = Notifier(env.run, env.run_id, boot_id, decode_channels(os.environ.get(ENV_NOTIFY, "")), _print_note)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\nhint: the image and the launcher must have the same version of swarmtrain\n")
        return EXIT_ERROR
    supervisor_watchdog.start_heartbeat_watchdog()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as set by the process that started it, see launchers.slurm.node_task
            signal.signal(number, lambda *_: stop.set())
    coordinator = Coordinator(
        run=env.run,
        max_restarts=env.max_restarts,
        max_restarts_per_hour=env.max_restarts_per_hour,
        min_nodes=env.min_nodes,
        boot_id=boot_id,
        run_id=env.run_id,
        clock=time.monotonic,
        publish_event=lambda event: _publish_event(event, notifier),
    )
    env = replace(env, bind=_resolve_bind_address(env))
    try:
        bound_server = CoordinatorServer((env.bind, env.coordinator_port), coordinator, load_run_key(), notifier)
    except CoordinatorError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_ERROR
    except OSError as error:
        sys.stderr.write(f"error: coordinator at {env.bind}:{env.coordinator_port}: {_format_socket_error(error)}\nhint: {_PORT_HINT}\n")
        return EXIT_ERROR
    with bound_server as server:
        notifier.start()
        if stop_by_queue := QueueStop.from_env(os.environ):
            notifier.notify_queue_stop(stop_by_queue)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _TICK_SECONDS}, daemon=True).start()
        store = _serve_c10d_store(env, server)
        if _wait_until_run_finished(server, stop):
            sys.stdout.flush()
            os._exit(EXIT_OK)  # no node knows the outcome any more: if this process were killed now, a successor would wait without end
        server.shutdown()
    del store
    return _EXIT_STOP_REQUESTED


class CoordinatorServer(socketserver.ThreadingTCPServer):
    """Serves swarmtrain.coordinator_client.CoordinatorClient: one request and one response, each a JSON line, per connection.

    With the run's key `key`, only requests are handled that are signed with it, for a nonce that this server has issued and that no other
    request has used. Of the others, the first one of each address is logged.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], coordinator: Coordinator, key: bytes = b"", notifier: Notifier | None = None) -> None:
        self.key, self.nonces = key, IssuedNonces()
        self._notifier = notifier
        self._intruders: set[str] = set()
        self._coordinator = coordinator
        self._rescue_arbiter = RescueArbiter(time.monotonic)
        self._rendezvous_states = RendezvousStates()
        self._over_since: float | None = None
        """When the run was over: it has an outcome, and nothing is left to do."""
        self._remaining_nodes: set[str] = set()
        """Nodes that have left, and remain until they learn that the run is over."""
        self.has_released_all_nodes = threading.Event()
        """Set when the last of them has learned it."""
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
                case "join" | "beat" | "close" | "leave" | "remain" as op:
                    self._learn_from_supervisor(request)
                    if op == "remain":
                        response = self._answer_remaining_node(request["node"])
                    else:
                        response = asdict(self._handle_supervisor_request(op, request))
                    records = self._notifier.export_records() if self._notifier else []
                    return response | ({NOTIFICATIONS_FIELD: records} if records else {})
                case "read_rendezvous_state" | "replace_rendezvous_state" as op:
                    return self._rendezvous_states.handle_request(op, request)
                case "report_surviving_rank" | "rescue_finished" | "rescue_pending" | "generation" as op:
                    return self._rescue_arbiter.handle_request(op, request)
                case op:
                    raise ValueError(f"unknown operation: {op}")

    def _handle_supervisor_request(self, op: str, request: dict[str, Any]) -> SupervisorResponse:
        node = request["node"]
        if op == "close":
            return self._coordinator.close_round(node, request["round"])
        if op == "leave":
            response = self._coordinator.record_node_exit(node, int(request["exit_code"]))
            if response.outcome and request["exit_code"] != EXIT_PLANNED:
                self._remaining_nodes.add(node)
            return response
        return self._coordinator.register_node(node) if op == "join" else self._coordinator.record_heartbeat(node)

    def _answer_remaining_node(self, node: str) -> dict[str, Any]:
        """Answer a node that remains for a coordinator that might replace this one. Once the run is over, the answer releases it."""
        self._remaining_nodes.add(node)
        return {RUN_OVER_FIELD: node if self._over_since is not None else ""}

    def record_released_node(self, node: str) -> None:
        """Record that `node`, which remained, has received that the run is over. After the last one, the process ends at once."""
        with self._lock:
            self._remaining_nodes.discard(node)
            if not self._remaining_nodes:
                self.has_released_all_nodes.set()

    def _learn_from_supervisor(self, request: dict[str, Any]) -> None:
        """Learn what an earlier coordinator, which was lost, sent to this supervisor: its notifications, and then the outcome.

        In this order: the outcome is not notified a second time.
        """
        if self._notifier:
            self._notifier.merge_records(request.get(NOTIFICATIONS_FIELD, ()))
        if outcome := request.get(OUTCOME_FIELD):
            self._coordinator.adopt_outcome(RunOutcome(**outcome))

    def report_refused_request(self, address: str) -> None:
        """Log that a request from `address` was not signed with the run's key, at most once for each of the first addresses."""
        with self._lock:
            if address not in self._intruders and len(self._intruders) < _MAX_REPORTED_INTRUDERS:
                self._intruders.add(address)
                message = f"refused a request from {address} that is not signed with the run's key"
                self._coordinator.handle_event(Event(EVENT_NOTE, {"node": RENDEZVOUS_SERVICE, "message": message}))

    def process_timeouts(self) -> bool:
        """Process the coordinator's timeouts, and those of notifications. Return whether the coordinator can exit.

        It exits after the nodes that remain for a coordinator that might replace it: only they know the outcome then.
        """
        if self._notifier:
            self._notifier.process_timeouts()
        with self._lock:
            self._coordinator.process_timeouts()
            if not (self._coordinator.is_finished and (self._notifier is None or self._notifier.is_finished)):
                self._over_since = None
                return False
            self._over_since = self._over_since or time.monotonic()
            return not self._remaining_nodes or time.monotonic() - self._over_since >= _RELEASE_SECONDS


class _RequestHandler(socketserver.StreamRequestHandler):
    timeout = _CLIENT_TIMEOUT_SECONDS
    server: CoordinatorServer

    def handle(self) -> None:
        line = self.rfile.readline(_MAX_REQUEST_BYTES)
        if not line:
            return  # the client only checked whether the coordinator listens
        if self.server.key:
            self._handle_signed_request(self.server.key, line)
        else:
            response = self._answer_request(line)
            self._send_json(response)
            self._record_response(response)

    def _handle_signed_request(self, key: bytes, line: bytes) -> None:
        """Handle the request in `line`; if it has no nonce that can be used, send one, and handle the request that follows."""
        nonces = self.server.nonces
        for is_retry in (False, True):
            message = open_signed_message(key, REQUEST_PURPOSE, line)
            if message is None:
                break
            if nonces.use_nonce(message.nonce):
                response = {**self._answer_request(message.body), NEXT_NONCE_FIELD: nonces.issue_nonce()}
                self.wfile.write(build_signed_message(key, RESPONSE_PURPOSE, message.nonce, json.dumps(response)))
                self._record_response(response)
                return
            if nonces.has_issued_nonce(message.nonce):
                break  # replayed
            if not is_retry:  # the client has no nonce yet, or has one of an earlier coordinator
                self._send_json({"nonce": nonces.issue_nonce()})
                line = self.rfile.readline(_MAX_REQUEST_BYTES)
        self.server.report_refused_request(self.client_address[0])
        self._send_json({"error": "the request is not signed with the run's key"})

    def _record_response(self, response: dict[str, Any]) -> None:
        if released_node := response.get(RUN_OVER_FIELD):
            self.server.record_released_node(released_node)

    def _send_json(self, message: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(message).encode() + b"\n")

    def _answer_request(self, body: bytes) -> dict[str, Any]:
        try:
            request = json.loads(body)
            if (version := request.pop("protocol", None)) == PROTOCOL_VERSION:
                return self.server.dispatch_request(request)
            return {"protocol": PROTOCOL_VERSION, "error": f"the request uses protocol {version}, not {PROTOCOL_VERSION}"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}


def _resolve_bind_address(env: CoordinatorEnv) -> str:
    """Return the address to listen on: `env.bind`, or all addresses if this machine does not have that one, for example behind NAT."""
    family = socket.AF_INET6 if ":" in env.bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((env.bind, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return "0.0.0.0"  # noqa: S104
    return env.bind


def _wait_until_run_finished(server: CoordinatorServer, stop_event: threading.Event) -> bool:
    while not stop_event.is_set():
        if server.process_timeouts() or server.has_released_all_nodes.wait(_TICK_SECONDS):
            return True
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


def _publish_event(event: Event, notifier: Notifier) -> None:
    try:
        _print_event(event)
    finally:  # the disk of the log may be full, which a notification may be about
        notifier.observe_event(event)


def _print_note(message: str) -> None:
    with contextlib.suppress(OSError):  # a note must not end a thread that delivers notifications
        _print_event(Event(EVENT_NOTE, {"node": RENDEZVOUS_SERVICE, "message": message}))


def _print_event(event: Event) -> None:
    sys.stdout.write(event.to_line() + "\n")
    sys.stdout.flush()
