"""The coordinator client survives a resolver that fails while the coordinator's address works."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import UNRESOLVED_COORDINATOR_TEXT, coordinator_client
from swarmtrain.protocol.coordinator_client import CoordinatorClient


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(json.dumps({"time": 1.0}).encode() + b"\n")


@pytest.fixture
def port() -> Iterator[int]:
    with socketserver.TCPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


class _Resolver:
    """Resolver that knows the name `rendezvous` while `names` has it; addresses always resolve."""

    def __init__(self) -> None:
        self.names = {"rendezvous": "127.0.0.1"}
        self._resolve = socket.getaddrinfo

    def __call__(self, host: str, *arguments: Any, **options: Any) -> Any:
        if host not in self.names and not host[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._resolve(self.names.get(host, host), *arguments, **options)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> _Resolver:
    resolver = _Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    return resolver


def test_the_last_address_that_answered_is_used_while_the_name_does_not_resolve(port: int, resolver: _Resolver) -> None:
    client = CoordinatorClient(f"rendezvous:{port}")
    client.wait_until_reachable(1.0)
    del resolver.names["rendezvous"]
    assert client.measure_clock_offset() > 0


def test_a_name_that_resolves_has_priority_over_the_last_address(port: int, resolver: _Resolver) -> None:
    client = CoordinatorClient(f"rendezvous:{port}")
    client.wait_until_reachable(1.0)
    resolver.names["rendezvous"] = "127.0.0.2"  # a restarted coordinator has a new address; here, nobody listens on it
    with pytest.raises(CoordinatorError, match="refused"):
        client.wait_until_reachable(0.1)


def test_a_name_that_does_not_resolve_is_logged_for_the_launcher(
    port: int, resolver: _Resolver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coordinator_client, "_UNRESOLVED_REPORT_SECONDS", 0.2)
    monkeypatch.setattr(coordinator_client, "_RETRY_SECONDS", 0.05)
    client = CoordinatorClient(f"rendezvous:{port}")
    resolver.names["rendezvous"] = "127.0.0.2"
    with pytest.raises(CoordinatorError, match="refused"):
        client.wait_until_reachable(0.5)
    assert capsys.readouterr().err == ""  # a coordinator that is starting has a name
    resolver.names.clear()
    with pytest.raises(CoordinatorError, match="Name or service not known"):
        client.wait_until_reachable(2.0)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 10  # every 0.2 s, less often on a busy machine
    assert all(line.startswith(f"{UNRESOLVED_COORDINATOR_TEXT} rendezvous for 0.2 s: ") for line in lines)


def test_a_name_that_has_never_resolved_is_an_error(port: int, resolver: _Resolver) -> None:
    resolver.names.clear()
    with pytest.raises(CoordinatorError, match="Name or service not known"):
        CoordinatorClient(f"rendezvous:{port}").wait_until_reachable(0.1)
