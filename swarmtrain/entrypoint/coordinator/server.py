"""The rendezvous role: serves the coordinator, which also keeps the store of torch's agents; one process per run, on any node.

Prints each event as one JSON line on standard output, and nothing else: launchers read that log.
Exit codes: 0 if the run has an outcome and all nodes have received it, 143 if the process was stopped before that (so that Swarm restarts
it), 1 if its port is in use or its environment is invalid.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from swarmtrain.entrypoint import supervisor_watchdog
from swarmtrain.entrypoint.coordinator.notifier import Notifier
from swarmtrain.entrypoint.coordinator.rescue import RescueArbiter
from swarmtrain.entrypoint.coordinator.round_stores import RoundStores
from swarmtrain.entrypoint.coordinator.state_machine import Coordinator
from swarmtrain.entrypoint.coordinator.strangers import RefusedRequests, UnverifiedConnections
from swarmtrain.errors import EXIT_ERROR, EXIT_OK, CoordinatorError
from swarmtrain.notifications.channel import decode_channels
from swarmtrain.process import raise_open_file_limit
from swarmtrain.protocol import (
    ENV_NOTIFY,
    EVENT_NOTE,
    OUTCOME_FIELD,
    PROTOCOL_VERSION,
    RENDEZVOUS_SERVICE,
    ConnectingRank,
    CoordinatorEnv,
    Event,
    RescueAssignment,
    RunOutcome,
    SupervisorResponse,
    SurvivorState,
    WorldAssignment,
    WorldRequest,
)
from swarmtrain.protocol.run_key import (
    MAX_FIRST_REQUEST_BYTES,
    NEXT_NONCE_FIELD,
    REQUEST_PURPOSE,
    RESPONSE_PURPOSE,
    IssuedNonces,
    SignedMessage,
    build_signed_message,
    load_run_key,
    open_signed_message,
)
from swarmtrain.queue_labels import QueueStop

_MAX_UNVERIFIED_BYTES, _MAX_REQUEST_BYTES = MAX_FIRST_REQUEST_BYTES, 1 << 20
_CONNECTION_SECONDS = 15.0
"""Seconds from the start of a connection to its end. A request may wait 5 s for a world or for a key of the store."""
_HOLD_SECONDS = 5.0
"""Maximum seconds for which a request waits for a world, or for its end."""
_SURVIVOR_HOLD_SECONDS = 2.0
"""Maximum seconds for which the report of a surviving rank waits: less than the 5 s after which a rank counts as lost."""
_BACKLOG = 4096
_TICK_SECONDS = 0.2
_PORT_HINT = "stop the process that listens there, or set runner.master_port to a free port"
_EXIT_STOP_REQUESTED = 128 + signal.SIGTERM


def main() -> int:
    """Serve the coordinator until the run is over, and return the exit code."""
    boot_id = f"{int(time.time()):x}{secrets.token_hex(2)}"
    try:
        env = CoordinatorEnv.from_env(os.environ)
        notifier = Notifier(env.run, env.run_id, boot_id, decode_channels(os.environ.get(ENV_NOTIFY, "")), _print_note)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\nhint: the image and the launcher must have the same version of swarmtrain\n")
        return EXIT_ERROR
    supervisor_watchdog.start_heartbeat_watchdog()
    raise_open_file_limit()
    coordinator = Coordinator(
        run=env.run,
        max_restarts=env.max_restarts,
        max_restarts_per_hour=env.max_restarts_per_hour,
        min_nodes=env.min_nodes,
        boot_id=boot_id,
        run_id=env.run_id,
        clock=time.monotonic,
        publish_event=lambda event: _publish_event(event, notifier),
        has_notified=lambda: notifier.is_finished,
    )
    try:
        return asyncio.run(_serve(env, CoordinatorServer(coordinator, load_run_key()), notifier))
    except CoordinatorError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_ERROR


async def _serve(env: CoordinatorEnv, server: CoordinatorServer, notifier: Notifier) -> int:
    """Serve until the run is over or a stop is requested, and return the exit code."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(_report_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as set by the process that started it, see launchers.slurm.node_task
            loop.add_signal_handler(number, stop.set)
    bind = _resolve_bind_address(env)
    try:
        await server.listen(bind, env.coordinator_port)
    except OSError as error:
        sys.stderr.write(f"error: coordinator at {bind}:{env.coordinator_port}: {_format_socket_error(error)}\nhint: {_PORT_HINT}\n")
        return EXIT_ERROR
    notifier.start()
    if stop_by_queue := QueueStop.from_env(os.environ):
        notifier.notify_queue_stop(stop_by_queue)
    waits = [asyncio.create_task(event.wait()) for event in (stop, server.finished)]
    while not stop.is_set():
        notifier.process_timeouts()
        if server.process_timeouts() or server.finished.is_set():
            sys.stdout.flush()
            os._exit(EXIT_OK)  # no node knows the outcome any more: if this process were killed now, a successor would wait without end
        await asyncio.wait(waits, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    server.close()
    return _EXIT_STOP_REQUESTED


def _report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error of the event loop. An error of the system, which strangers can cause, has no traceback."""
    if isinstance(context.get("exception"), OSError):
        sys.stderr.write(f"swarmtrain: {context['message']}: {context['exception']}\n")
    else:
        loop.default_exception_handler(context)


class CoordinatorServer:
    """Serves swarmtrain.protocol.coordinator_client.CoordinatorClient: one request and one response, each a JSON line, per connection.

    With the run's key `key`, only requests are handled that are signed with it, for a nonce that this server has issued and that no other
    request has used. All methods run in one event loop.
    """

    def __init__(self, coordinator: Coordinator, key: bytes = b"") -> None:
        self.key, self.nonces = key, IssuedNonces()
        self._coordinator = coordinator
        self._rescue_arbiter = RescueArbiter(time.monotonic)
        self._round_stores = RoundStores()
        self._unverified_connections = UnverifiedConnections()
        self._refused_requests = RefusedRequests(time.monotonic)
        self.finished = asyncio.Event()
        """Set when the response that the run is over was sent to the last node."""
        self._listener: asyncio.Server | None = None
        self._state, self._state_changed = self._read_state(), asyncio.Event()

    async def listen(self, host: str, port: int) -> int:
        """Listen at this address, and return the port. Raises OSError."""
        self._listener = await asyncio.start_server(self._handle_connection, host, port, limit=_MAX_UNVERIFIED_BYTES, backlog=_BACKLOG)
        return int(self._listener.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        if self._listener:
            self._listener.close()

    async def dispatch_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle the JSON object `request` and return the response. Raises ValueError, KeyError or TypeError if it is malformed."""
        match request.pop("op"):
            case "ping":
                return {"time": time.time()}
            case "report_connecting_rank":
                return asdict(self._coordinator.record_connecting_rank(ConnectingRank(**request)))
            case "post":
                event = Event(request["kind"], request["data"])
                self._rescue_arbiter.record_dead_rank(event)
                return asdict(self._coordinator.handle_event(event))
            case "join" | "beat" | "close" | "leave" as op:
                return asdict(self._handle_supervisor_request(op, request))
            case "store" | "request_world" | "is_world_over" | "end_world" | "report_surviving_rank" as op:
                return await self._handle_held_request(op, request)
            case "rescue_finished" | "rescue_pending" | "generation" as op:
                return self._rescue_arbiter.handle_request(op, request)
            case op:
                raise ValueError(f"unknown operation: {op}")

    async def _handle_held_request(self, op: str, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request whose response may wait for those of other nodes."""
        if op == "store":
            return await self._round_stores.handle_request(request)
        if op == "report_surviving_rank":
            return asdict(await self._record_surviving_rank(request["world"], int(request["rank"]), SurvivorState(**request["state"])))
        if op == "request_world":
            world_request = WorldRequest(**request)
            await self._wait_for(lambda: self._coordinator.assign_world(world_request) != WorldAssignment())
            return asdict(self._coordinator.assign_world(world_request))
        world = str(request["world"])
        if op == "end_world":
            self._coordinator.end_world(world)
            return {}
        await self._wait_for(lambda: self._coordinator.is_world_over(world))
        return {"is_over": self._coordinator.is_world_over(world)}

    def _handle_supervisor_request(self, op: str, request: dict[str, Any]) -> SupervisorResponse:
        node = request["node"]
        if outcome := request.get(OUTCOME_FIELD):  # that an earlier coordinator, which was lost, sent to this supervisor
            self._coordinator.adopt_outcome(RunOutcome(**outcome))
        if op == "close":
            return self._coordinator.close_round(node, request["round"])
        if op == "leave":
            return self._coordinator.record_node_exit(node, int(request["exit_code"]))
        return self._coordinator.register_node(node) if op == "join" else self._coordinator.record_heartbeat(node)

    def process_timeouts(self) -> bool:
        """Process the timeouts of the coordinator and of refused requests. Return whether the coordinator can exit."""
        if report := self._refused_requests.take_report():
            self._coordinator.handle_event(Event(EVENT_NOTE, {"node": RENDEZVOUS_SERVICE, "message": report}))
        self._coordinator.process_timeouts()
        self._rescue_arbiter.process_timeouts()
        self._wake_waiting_requests()
        return self._coordinator.is_finished

    async def _record_surviving_rank(self, world: str, rank: int, state: SurvivorState) -> RescueAssignment:
        """Return the assignment of writers, for a rank that does not write only when it has changed, or after 2 s."""
        rescue = self._rescue_arbiter.record_surviving_rank(world, rank, state)
        if rescue.is_finished or rank in rescue.writers:
            return rescue
        await self._wait_for(lambda: self._rescue_arbiter.assignments.get(world) != rescue, _SURVIVOR_HOLD_SECONDS)
        return self._rescue_arbiter.assignments.get(world, rescue)

    async def _wait_for(self, has_come: Callable[[], bool], seconds: float = _HOLD_SECONDS) -> None:
        """Wait for at most `seconds` until `has_come`, which depends on what `_read_state` returns."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not has_come():
                    self._wake_waiting_requests()
                    await self._state_changed.wait()

    def _wake_waiting_requests(self) -> None:
        """Wake all requests that wait for a world, for its end, or for an assignment of writers, if that may have come."""
        if (state := self._read_state()) != self._state:
            self._state = state
            self._state_changed.set()
            self._state_changed = asyncio.Event()

    def _read_state(self) -> object:
        return self._coordinator.world_state, self._rescue_arbiter.assignments

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection. What a stranger sends, or does not send, has no traceback."""
        address = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        try:
            with self._unverified_connections.track(address, writer.transport.abort) as mark_verified:
                async with asyncio.timeout(_CONNECTION_SECONDS):
                    await self._handle_request(reader, writer, address, mark_verified)
        except (OSError, TimeoutError):
            pass  # the client has gone, or is too slow
        finally:
            writer.close()

    async def _handle_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, mark_verified: Callable[[], None]
    ) -> None:
        """Answer the request that the client sends; if it has no nonce that can be used, send one, and answer the next request."""
        max_bytes = _MAX_UNVERIFIED_BYTES if self.key else _MAX_REQUEST_BYTES
        while line := await _read_line(reader, max_bytes):
            message = open_signed_message(self.key, REQUEST_PURPOSE, line) if self.key else SignedMessage(line, "")
            if message is None:
                break
            if not self.key or self.nonces.use_nonce(message.nonce):
                mark_verified()
                response = await self._answer_request(message.body)
                await _send_line(writer, self._sign_response(response, message.nonce))
                if self._coordinator.is_finished:
                    self.finished.set()
                return
            if self.nonces.has_issued_nonce(message.nonce) or max_bytes == _MAX_REQUEST_BYTES:
                break  # replayed
            await _send_line(writer, json.dumps({"nonce": self.nonces.issue_nonce()}).encode() + b"\n")
            max_bytes = _MAX_REQUEST_BYTES  # the client has the key, or repeats what such a client sent
        if line:
            self._refused_requests.record_refusal(address)
            await _send_line(writer, json.dumps({"error": "the request is not signed with the run's key"}).encode() + b"\n")

    def _sign_response(self, response: dict[str, Any], nonce: str) -> bytes:
        if not self.key:
            return json.dumps(response).encode() + b"\n"
        return build_signed_message(
            self.key, RESPONSE_PURPOSE, nonce, json.dumps({**response, NEXT_NONCE_FIELD: self.nonces.issue_nonce()})
        )

    async def _answer_request(self, body: bytes) -> dict[str, Any]:
        try:
            request = json.loads(body)
            if (version := request.pop("protocol", None)) == PROTOCOL_VERSION:
                response = await self.dispatch_request(request)
                self._wake_waiting_requests()
                return response
            return {"protocol": PROTOCOL_VERSION, "error": f"the request uses protocol {version}, not {PROTOCOL_VERSION}"}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}


async def _read_line(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Return the line that the client sends, without more than `max_bytes`; empty if it sends none."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= max_bytes and (chunk := await reader.read(max_bytes + 1 - len(line))):
        line += chunk
    return bytes(line)


async def _send_line(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line)
    await writer.drain()


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
