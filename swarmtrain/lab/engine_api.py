"""Minimal client of the Docker engine API over a Unix socket; it needs only the standard library."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmtrain.errors import LabError


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, socket_path: Path, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def send_request(socket_path: Path, method: str, api_path: str, body: Mapping[str, object] | None = None, *, timeout: float = 30) -> Any:
    """Send a request to the engine at the socket `socket_path` and return the parsed response; None if the response is not JSON.

    `timeout` is in seconds. Raises OSError if no engine answers, LabError with the engine's message if it refuses the request.
    """
    connection = _SocketConnection(socket_path, timeout)
    try:
        connection.request(method, api_path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{socket_path}: {error!r}") from None
    finally:
        connection.close()
    if response.status >= 400:
        raise LabError(f"the engine refused {method} {api_path}: {text.strip()}", place=socket_path.parent.name)
    return json.loads(text) if text.strip().startswith(("{", "[", '"')) else None
