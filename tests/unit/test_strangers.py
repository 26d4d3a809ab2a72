"""What clients without the run's key cost the coordinator is bounded: connections, time, bytes, and lines of its log."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from coordinator_thread import ServedCoordinator, serve_coordinator
from intruder import REFUSAL, Intruder

from swarmtrain.entrypoint.coordinator import server
from swarmtrain.entrypoint.coordinator.strangers import RefusedRequests, UnverifiedConnections
from swarmtrain.protocol import EVENT_CHECKPOINT, EVENT_NOTE, Event
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol.run_key import create_run_key

KEY = create_run_key()


@pytest.fixture
def served() -> Iterator[ServedCoordinator]:
    with serve_coordinator(KEY) as served:
        yield served


def is_closed(connection: socket.socket, seconds: float = 5.0) -> bool:
    """Return whether the server closes `connection` within so many seconds."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_a_new_connection_beyond_the_limit_of_its_address_closes_the_oldest_of_that_address() -> None:
    connections, closed = UnverifiedConnections(max_per_address=2, max_total=10), []
    with ExitStack() as stack:
        for name in ("a1", "b1", "a2", "a3", "b2", "a4"):
            stack.enter_context(connections.track(name[0], lambda name=name: closed.append(name)))
        assert closed == ["a1", "a2"]


def test_a_new_connection_beyond_the_total_limit_closes_the_oldest_one_that_is_not_verified() -> None:
    connections, closed = UnverifiedConnections(max_per_address=2, max_total=3), []
    with ExitStack() as stack:
        mark_verified, *_ = [stack.enter_context(connections.track(name, lambda name=name: closed.append(name))) for name in "abc"]
        mark_verified()
        stack.enter_context(connections.track("d", lambda: None))
        assert closed == []
        stack.enter_context(connections.track("e", lambda: None))
        assert closed == ["b"]


def test_nodes_are_answered_while_strangers_hold_every_connection(served: ServedCoordinator) -> None:
    held = []
    for _ in range(600):
        held.append(Intruder(served.address).connect())
        held[-1].send(b"x")
    assert is_closed(held[0]), "the oldest connections of the address are closed"
    assert not is_closed(held[-1], 0.1)
    client = CoordinatorClient(served.address, key=KEY)
    client.register_node("node0")
    assert client.send_heartbeat("node0").round == "b-1"
    for connection in held:
        connection.close()


def test_a_client_that_sends_a_byte_now_and_then_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_CONNECTION_SECONDS", 1.0)
    with serve_coordinator(KEY) as served, Intruder(served.address).connect() as connection:
        end = time.monotonic() + 10
        while not is_closed(connection, 0.2):
            assert time.monotonic() < end
            connection.send(b"x")


def test_an_unverified_line_is_read_up_to_4_kib(served: ServedCoordinator) -> None:
    assert Intruder(served.address).send_long_line() == REFUSAL


def test_connections_that_reset_print_nothing(served: ServedCoordinator, capfd: pytest.CaptureFixture[str]) -> None:
    Intruder(served.address).reset_connections(300)
    for _ in range(20):  # in the middle of a request, and of its response
        with Intruder(served.address).connect() as connection:
            connection.send(b"{}\n")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.5)
    assert capfd.readouterr() == ("", "")
    assert len(served.list_events(EVENT_NOTE)) <= 1


def test_a_client_that_gives_up_after_its_nonce_is_not_reported(served: ServedCoordinator) -> None:
    for _ in range(5):
        Intruder(served.address).request_nonce(KEY)
    time.sleep(0.3)
    assert served.list_events(EVENT_NOTE) == []


def test_reports_of_refused_requests_are_counted_and_become_rare() -> None:
    now = 0.0
    refused = RefusedRequests(lambda: now)
    assert refused.take_report() is None
    refused.record_refusal("10.0.0.1")
    assert refused.take_report() == "refused 1 request from 10.0.0.1 that is not signed with the run's key"
    reports, month = [], 30 * 86400
    while now < month:
        now += 10
        refused.record_refusal("10.0.0.1")
        refused.record_refusal("10.0.0.2")
        if report := refused.take_report():
            reports.append(report)
    assert reports[0] == "refused 12 requests from 10.0.0.1 and another address that are not signed with the run's key"
    assert len(reports) < 750, "fewer than one per hour, 100 KB in a month"


def test_events_of_the_run_are_published_while_strangers_are_refused(served: ServedCoordinator) -> None:
    intruder, client = Intruder(served.address), CoordinatorClient(served.address, key=KEY)
    for step in range(50):
        assert intruder.send_unsigned_request("{}") == REFUSAL
        client.post_event(Event(EVENT_CHECKPOINT, {"step": step}))
    assert [event.data["step"] for event in served.list_events(EVENT_CHECKPOINT)] == list(range(50))
    assert len(served.list_events(EVENT_NOTE)) == 1
