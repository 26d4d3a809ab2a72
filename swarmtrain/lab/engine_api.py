"""Minimal client of the Docker engine API over a Unix socket, which needs only the standard library."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmtrain.errors import LabError


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def send_request(path: Path, method: str, target: str, body: Mapping[str, object] | None = None, *, timeout: float = 30) -> Any:
    """Send a request to the engine at the socket `path` and return the parsed response; None if the response is not JSON.

    `timeout` is in seconds. Raises OSError if no engine answers, LabError with the engine's message if it refuses.
    """
    connection = _SocketConnection(path, timeout)
    try:
        connection.request(method, target, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{path}: {error!r}") from None
    finally:
        connection.close()
    if response.status >= 400:
        raise LabError(f"the engine refused {method} {target}: {text.strip()}", place=path.parent.name)
    return json.loads(text) if text.strip().startswith(("{", "[", '"')) else None
