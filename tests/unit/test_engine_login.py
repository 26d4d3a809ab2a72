"""The login for an image's registry is sent when services are created, from docker's own file or a credential helper."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from swarmtrain.launchers.common.docker_engine import DockerEngine

IMAGE = "registry.site:5000/swarmtrain:1"
HELPER = """#!/bin/sh
if [ "$1" = list ]; then echo '{"registry.site:5000": "me"}'; exit; fi
read -r server
printf '{"ServerURL": "%s", "Username": "me", "Secret": "word of %s"}' "$server" "$server"
"""


class EngineHandler(BaseHTTPRequestHandler):
    """An engine that accepts every request, and records the logins."""

    logins: ClassVar[list[dict[str, str]]] = []

    def do_POST(self) -> None:  # http.server defines the name
        login = self.headers.get("X-Registry-Auth")
        self.logins.append(json.loads(base64.urlsafe_b64decode(login)) if login else {})
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send_json({"ID": "made"})

    def do_GET(self) -> None:
        self._send_json({"ApiVersion": "1.41", "Version": "20.10.24"})

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), EngineHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.server_port}"
        server.shutdown()


def read_sent_login(address: str, folder: Path, config: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    DockerEngine(address).post("/services/create", {}, image=IMAGE)
    return EngineHandler.logins[-1]


def test_from_dockers_own_file(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = base64.b64encode(b"me:word").decode()
    found = read_sent_login(address, tmp_path, {"auths": {"registry.site:5000": {"auth": auth}}}, monkeypatch)
    assert (found["username"], found["password"]) == ("me", "word")


@pytest.mark.parametrize("config", [{"credsStore": "site"}, {"credHelpers": {"registry.site:5000": "site"}}], ids=["store", "helper"])
def test_from_a_credential_helper(config: dict[str, object], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-site"
    helper.write_text(HELPER)
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = read_sent_login(address, tmp_path, config, monkeypatch)
    assert (found["Username"], found["Password"]) == ("me", "word of registry.site:5000")


def test_no_login_where_none_is_stored(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_sent_login(address, tmp_path, {}, monkeypatch) == {}
