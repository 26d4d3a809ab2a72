"""Client of the coordinator. Each connection carries one request and one response, each as a line of JSON.

If the run has a key, request and response are signed with it (protocol.run_key), for a nonce that the coordinator has issued in its
previous response to this client, or else in an additional response.

Supervisors send heartbeats, and ranks post events. Each call resolves the host name and opens a new connection, so that a coordinator may
restart under a new address. While the name does not resolve, calls use the last address that answered: in Docker 29.0 to 29.6, names may
stay unresolvable for hours after a node lost its link, while addresses work.
Standard library only, so that a node whose image lacks torch can still report the missing package.
The server is swarmtrain.entrypoint.coordinator.server.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict
from io import BufferedRWPair
from typing import Any

from swarmtrain import __version__
from swarmtrain.errors import CoordinatorError, CoordinatorNameError, ProtocolMismatch
from swarmtrain.protocol import (
    OUTCOME_FIELD,
    PROTOCOL_VERSION,
    UNRESOLVED_COORDINATOR_TEXT,
    ConnectingRank,
    ConnectingWorld,
    Event,
    EventResponse,
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
    build_signed_message,
    load_run_key,
    open_signed_message,
)

_RETRY_SECONDS = 0.5
_OFFSET_SAMPLES = 5
# Until a new coordinator's name resolves, seconds pass; its image may have to be pulled first.
_UNRESOLVED_REPORT_SECONDS = 30.0


class CoordinatorClient:
    """Client of the coordinator at `address` (host:port). `timeout` limits one call, in seconds.

    `key`: the run's key; by default, the one that the environment variables of this process name.
    """

    def __init__(self, address: str, *, timeout: float = 5.0, key: bytes | None = None) -> None:
        self.address = address
        self.timeout = timeout
        self._last_address: tuple[str, int] | None = None
        self._key = key
        self._nonce, self._nonce_pid = "", 0
        self._nonce_lock = threading.Lock()
        self._outcome: dict[str, Any] | None = None

    @property
    def knows_outcome(self) -> bool:
        """Whether a response to this client contained the outcome of the run."""
        return self._outcome is not None

    def post_event(self, event: Event) -> EventResponse:
        """Post `event` to the coordinator and return its response. Raises CoordinatorError if the coordinator cannot be reached."""
        return EventResponse(**self._send_request("post", kind=event.kind, data=event.data))

    def try_post_event(self, event: Event) -> EventResponse:
        """Post `event` and return the coordinator's response. On CoordinatorError, log to stderr and return an empty response."""
        try:
            return self.post_event(event)
        except CoordinatorError as error:
            sys.stderr.write(f"swarmtrain: could not post `{event.kind}`: {error}\n")
            sys.stderr.flush()
            return EventResponse()

    def register_node(self, node: str) -> None:
        """Register the node `node`. From then on the coordinator expects one heartbeat per second from it.

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        self._send_supervisor_request("join", node=node)

    def send_heartbeat(self, node: str) -> SupervisorResponse:
        """Send a heartbeat of `node` and return the response. Raises CoordinatorError if the coordinator cannot be reached."""
        return self._send_supervisor_request("beat", node=node)

    def report_round_closed(self, node: str, round: str) -> SupervisorResponse:
        """Report that the round `round` ("" before the first) is closed for `node`. Return the response, with the next round.

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        return self._send_supervisor_request("close", node=node, round=round)

    def report_node_exit(self, node: str, exit_code: int) -> SupervisorResponse:
        """Report that `node` exits: with 0 if all its ranks are done, with EXIT_PLANNED if a stop was requested.

        Returns the coordinator's response. If it has an outcome, the node repeats this until the run is over. Raises CoordinatorError if
        the coordinator cannot be reached.
        """
        return self._send_supervisor_request("leave", node=node, exit_code=exit_code)

    def request_world(self, request: WorldRequest) -> WorldAssignment:
        """Wait for at most 5 s for the next world, and return the ranks of a node in it. An agent repeats the request until then.

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        return WorldAssignment(**self._send_request("request_world", **asdict(request)))

    def is_world_over(self, world: str) -> bool:
        """Wait for at most 5 s until the ranks of `world` must end, and return whether they must.

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        return bool(self._send_request("is_world_over", world=world)["is_over"])

    def end_world(self, world: str) -> None:
        """Report that ranks have left `world`, so that the others must end, too. Raises CoordinatorError if it cannot be reached."""
        self._send_request("end_world", world=world)

    def report_connecting_rank(self, rank: ConnectingRank) -> ConnectingWorld:
        """Report a rank that waits in init_process_group, or no longer does. Return the state of its world.

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        response = self._send_request("report_connecting_rank", **asdict(rank))
        return ConnectingWorld(response["waiting_ranks"], response["seconds_since_last_arrival"])

    def report_surviving_rank(self, world: str, rank: int, state: SurvivorState) -> RescueAssignment:
        """Report the state of surviving rank `rank` of the failed world `world`. Return the ranks that write a checkpoint.

        To a rank that does not write, the coordinator responds when this has changed, or after 2 s. The rank calls this repeatedly until
        the just-in-time checkpoint is finished; if the calls stop, the rank counts as lost. Raises CoordinatorError if the coordinator
        cannot be reached.
        """
        response = self._send_request("report_surviving_rank", world=world, rank=rank, state=asdict(state))
        return RescueAssignment(**{**response, "writers": tuple(response["writers"])})

    def report_rescue_finished(self, world: str, attempt: int, rank: int) -> None:
        """Report that writer `rank` has finished attempt `attempt` of a just-in-time checkpoint, successfully or not.

        `rank` is the first of the writers that share a file system. Raises CoordinatorError if the coordinator cannot be reached.
        """
        self._send_request("rescue_finished", world=world, attempt=attempt, rank=rank)

    def is_rescue_pending(self) -> bool:
        """Return whether surviving ranks of a failed world are writing a just-in-time checkpoint.

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        return bool(self._send_request("rescue_pending")["rescue_pending"])

    def request_generation(self, highest_generation: int) -> int:
        """Return a new generation number (fencing token), higher than `highest_generation` and than all issued before.

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        return int(self._send_request("generation", above=highest_generation)["generation"])

    def send_store_command(self, round: str, command: str, **fields: Any) -> dict[str, Any]:
        """Run a command for the store of torch's agents in `round`, and return its result (coordinator.round_stores).

        Raises CoordinatorError if the coordinator cannot be reached.
        """
        return self._send_request("store", round=round, command=command, **fields)

    def measure_clock_offset(self) -> float:
        """Return by how many seconds this machine's wall clock is ahead of the coordinator's (negative if behind).

        The sample with the shortest round trip counts; the error is at most half of that round trip. Raises CoordinatorError if the
        coordinator cannot be reached.
        """
        return min(self._sample_clock_offset() for _ in range(_OFFSET_SAMPLES))[1]

    def _sample_clock_offset(self) -> tuple[float, float]:
        sent_at = time.time()
        coordinator_time = float(self._send_request("ping")["time"])
        received_at = time.time()
        return received_at - sent_at, (sent_at + received_at) / 2 - coordinator_time

    def wait_until_reachable(self, timeout: float) -> None:
        """Wait until the coordinator responds, for at most `timeout` seconds.

        The host name is resolved again at each attempt, since DNS may lag by seconds. If it does not resolve for 30 s, this is logged to
        stderr, where a launcher that follows the run reads it. Raises CoordinatorError with the last error if the coordinator does not
        respond in time.
        """
        deadline, next_report_at = time.monotonic() + timeout, time.monotonic() + _UNRESOLVED_REPORT_SECONDS
        while True:
            try:
                self._send_request("ping")
                return
            except ProtocolMismatch:
                raise
            except CoordinatorError as error:
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise CoordinatorError(
                        f"no response within {timeout:g} s: {error.message}", place=error.place, hint=error.hint
                    ) from None
                if not isinstance(error, CoordinatorNameError):
                    next_report_at = time.monotonic() + _UNRESOLVED_REPORT_SECONDS
                elif time.monotonic() >= next_report_at:
                    next_report_at = time.monotonic() + _UNRESOLVED_REPORT_SECONDS
                    self._log_unresolved_name(error)
            time.sleep(_RETRY_SECONDS)

    def _log_unresolved_name(self, error: CoordinatorNameError) -> None:
        host = self.address.rpartition(":")[0]
        sys.stderr.write(f"{UNRESOLVED_COORDINATOR_TEXT} {host} for {_UNRESOLVED_REPORT_SECONDS:g} s: {error.message}\n")
        sys.stderr.flush()

    def _send_supervisor_request(self, op: str, **fields: Any) -> SupervisorResponse:
        """Send a request of a supervisor, with the outcome if it is known: a coordinator that has been restarted does not know it."""
        response = self._send_request(op, **fields, **({OUTCOME_FIELD: self._outcome} if self._outcome else {}))
        self._outcome = response[OUTCOME_FIELD] or self._outcome
        return SupervisorResponse(**{**response, OUTCOME_FIELD: RunOutcome(**self._outcome) if self._outcome else None})

    def _send_request(self, op: str, **fields: Any) -> dict[str, Any]:
        request = json.dumps({"op": op, "protocol": PROTOCOL_VERSION, **fields}, default=str)
        try:
            with self._open_connection() as connection, connection.makefile("rwb") as stream:
                address = connection.getpeername()[:2]
                key = load_run_key() if self._key is None else self._key
                response = self._send_signed_request(stream, key, request) if key else _send_unsigned_request(stream, request)
        except socket.gaierror as error:
            raise CoordinatorNameError(str(error), place=f"coordinator {self.address}") from None
        except (OSError, ValueError) as error:
            raise CoordinatorError(str(error), place=f"coordinator {self.address}") from None
        self._last_address = address
        if response.get("protocol", PROTOCOL_VERSION) != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"uses protocol version {response['protocol']}, but swarmtrain {__version__} on this machine uses "
                f"version {PROTOCOL_VERSION}",
                place=f"coordinator {self.address}",
                hint="deploy the run again, so that all nodes have the same version of swarmtrain",
            )
        if "error" in response:
            raise CoordinatorError(response["error"], place=f"coordinator {self.address}")
        return response

    def _open_connection(self) -> socket.socket:
        """Return a connection to the coordinator; to the last address that answered if its host name does not resolve. Raises OSError."""
        host, _, port = self.address.rpartition(":")
        try:
            return socket.create_connection((host, int(port)), timeout=self.timeout)
        except socket.gaierror:
            if self._last_address is None:
                raise
            return socket.create_connection(self._last_address, timeout=self.timeout)

    def _send_signed_request(self, stream: BufferedRWPair, key: bytes, request: str) -> dict[str, Any]:
        """Send `request`, signed with `key`, and return the response. Raises OSError, and ValueError if it is not signed with the key."""
        with self._nonce_lock:
            nonce = self._nonce if self._nonce_pid == os.getpid() else ""  # not that of the process from which this one was forked
            self._nonce = ""
        line = build_signed_message(key, REQUEST_PURPOSE, nonce, request)
        if not nonce or len(line) > MAX_FIRST_REQUEST_BYTES:
            line = build_signed_message(key, REQUEST_PURPOSE, "", "")  # shows that this client has the key, and requests a nonce
        line = _send_line(stream, line)
        if (new_nonce := _parse_new_nonce(line)) is not None:
            nonce = new_nonce
            line = _send_line(stream, build_signed_message(key, REQUEST_PURPOSE, nonce, request))
        message = open_signed_message(key, RESPONSE_PURPOSE, line)
        if message is None or message.nonce != nonce:
            raise ValueError("its response is not signed with the run's key")
        response: dict[str, Any] = json.loads(message.body)
        with self._nonce_lock:
            self._nonce, self._nonce_pid = str(response.pop(NEXT_NONCE_FIELD)), os.getpid()
        return response


def _send_unsigned_request(stream: BufferedRWPair, request: str) -> dict[str, Any]:
    """Send `request` and return the response. Raises OSError, ValueError."""
    response: dict[str, Any] = json.loads(_send_line(stream, request.encode() + b"\n"))
    return response


def _send_line(stream: BufferedRWPair, line: bytes) -> bytes:
    """Send `line` and return the line with which the coordinator responds."""
    stream.write(line)
    stream.flush()
    return stream.readline()


def _parse_new_nonce(line: bytes) -> str | None:
    """Return the nonce that the coordinator has issued instead of a response; None if `line` is a signed response.

    Raises ValueError with the coordinator's error message if it refused the request.
    """
    if not line.startswith(b"{"):
        return None
    fields = json.loads(line)
    if "nonce" not in fields:
        raise ValueError(fields.get("error"))
    return str(fields["nonce"])
