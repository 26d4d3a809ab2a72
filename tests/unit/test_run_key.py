"""The key of a run: who has it is answered, and nobody else."""

from __future__ import annotations

import copy
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from coordinator_thread import ServedCoordinator, serve_coordinator
from intruder import FALSE_LEADER, FATAL_FAILURE, REFUSAL, Intruder

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import EVENT_NOTE, EVENT_OUTCOME, coordinator_client
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol.run_key import IssuedNonces, SignedMessage, build_signed_message, create_run_key, load_run_key, open_signed_message

KEY = create_run_key()


@pytest.fixture
def served() -> Iterator[ServedCoordinator]:
    with serve_coordinator(KEY) as served:
        yield served


def test_a_process_with_the_key_is_answered(served: ServedCoordinator) -> None:
    client = CoordinatorClient(served.address, key=KEY)
    client.register_node("node0")
    assert client.send_heartbeat("node0").round == "b-1"


def test_requests_of_an_intruder_are_refused_and_counted(served: ServedCoordinator) -> None:
    intruder = Intruder(served.address)
    for _ in range(2):
        assert intruder.send_unsigned_request(FATAL_FAILURE) == REFUSAL
        assert intruder.send_unsigned_request(FALSE_LEADER) == REFUSAL
        assert intruder.replay_request(KEY) == REFUSAL
        assert intruder.alter_request(KEY) == REFUSAL
    assert served.list_events(EVENT_OUTCOME) == []
    time.sleep(0.1)  # longer than the interval at which the server processes timeouts
    [note] = served.list_events(EVENT_NOTE)
    assert re.fullmatch(r"refused \d requests? from 127\.0\.0\.1 that (is|are) not signed with the run's key", note.data["message"])


def test_a_connection_without_a_request_is_not_logged(served: ServedCoordinator) -> None:
    with Intruder(served.address).connect() as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert served.list_events(EVENT_NOTE) == []


def test_a_client_without_the_key_or_with_another_one_reports_that(served: ServedCoordinator) -> None:
    with pytest.raises(CoordinatorError, match="the request is not signed with the run's key"):
        CoordinatorClient(served.address, key=b"").register_node("node0")
    with pytest.raises(CoordinatorError, match="the request is not signed with the run's key"):
        CoordinatorClient(served.address, key=create_run_key()).register_node("node0")


def test_a_client_does_not_believe_a_server_without_the_key() -> None:
    """An intruder who takes over the address of the coordinator cannot answer in its place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                stream.readline()
                body = '{"round": "evil", "outcome": null, "wait": false, "next_nonce": ""}'
                stream.write(build_signed_message(create_run_key(), "response", "", body))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CoordinatorError, match="its response is not signed with the run's key"):
            CoordinatorClient(f"127.0.0.1:{listener.getsockname()[1]}", key=KEY).send_heartbeat("node0")
        thread.join()


def test_a_signature_is_valid_for_its_purpose_its_nonce_and_its_body_only() -> None:
    line = build_signed_message(KEY, "request", "n", "body")
    assert open_signed_message(KEY, "request", line) == SignedMessage(b"body", "n")
    for key, purpose, altered in (
        (create_run_key(), "request", line),
        (KEY, "response", line),
        (KEY, "request", line.replace(b" n ", b" m ")),
        (KEY, "request", line.replace(b"body", b"bodY")),
        (KEY, "request", b"[]"),
        (KEY, "request", b"a b"),
        (KEY, "request", b"\xff"),
        (KEY, "request", b""),
    ):
        assert open_signed_message(key, purpose, altered) is None


def test_a_client_asks_for_a_nonce_only_once(served: ServedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    client = CoordinatorClient(served.address, key=KEY)
    sent: list[bytes] = []
    send = coordinator_client._send_line
    monkeypatch.setattr(coordinator_client, "_send_line", lambda stream, line: sent.append(line) or send(stream, line))
    client.register_node("node0")
    assert len(sent) == 2
    client.send_heartbeat("node0")
    assert len(sent) == 3


def test_a_client_continues_with_a_restarted_coordinator_and_in_several_threads(served: ServedCoordinator) -> None:
    client = CoordinatorClient(served.address, key=KEY)
    client.register_node("node0")
    served.server.nonces = IssuedNonces()  # as in a restarted coordinator
    with ThreadPoolExecutor(8) as pool:
        assert {response.round for response in pool.map(client.send_heartbeat, ["node0"] * 100)} == {"b-1"}
    assert served.list_events(EVENT_NOTE) == []


def test_a_forked_process_does_not_use_the_nonce_of_its_parent(served: ServedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    client = CoordinatorClient(served.address, key=KEY)
    client.register_node("node0")
    child = copy.copy(client)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    child.send_heartbeat("node0")
    monkeypatch.undo()
    client.send_heartbeat("node0")
    assert served.list_events(EVENT_NOTE) == []


def test_old_nonces_are_dropped() -> None:
    nonces = IssuedNonces(max_count=2)
    first, second, third = nonces.issue_nonce(), nonces.issue_nonce(), nonces.issue_nonce()
    assert [nonces.use_nonce(nonce) for nonce in (first, second, third, third, "")] == [False, True, True, False, False]
    assert [nonces.has_issued_nonce(nonce) for nonce in (first, "", IssuedNonces().issue_nonce())] == [True, False, False]


def test_the_key_is_read_from_the_file_that_the_environment_names(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert load_run_key({"SWARMTRAIN_KEY_FILE": str(tmp_path / "key")}) == KEY
    assert load_run_key({"SWARMTRAIN_KEY_FILE": ""}) == load_run_key({}) == b""
    (tmp_path / "empty").touch()
    for name, reason in (("missing", "No such file"), ("empty", "has 0 characters, not 64")):
        with pytest.raises(CoordinatorError, match=reason):
            load_run_key({"SWARMTRAIN_KEY_FILE": str(tmp_path / name)})
