"""A proxy in front of an engine's socket. It can drop all connections and refuse new ones."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path

_CHANGE_PATTERN = re.compile(rb"(POST|DELETE) ")


class EngineProxy:
    """Forwards the socket `path` to the engine's socket `target`. A context manager; `address` is a value for DOCKER_HOST."""

    def __init__(self, target: str, path: Path) -> None:
        self._target, self._path = target.removeprefix("unix://"), path
        self.address = f"unix://{path}"
        self.change_count = 0
        """Number of requests since the last reconnect that change something."""
        self._disconnect_after: int | None = None
        self._lock = threading.Lock()
        self._open_sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def __enter__(self) -> EngineProxy:
        self.reconnect()
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def reconnect(self, *, disconnect_after: int | None = None) -> None:
        """Listen again. After `disconnect_after` changing requests, drop all connections; the last one's response is lost."""
        with self._lock:
            self.change_count, self._disconnect_after = 0, disconnect_after
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(128)
        self._listener = listener
        threading.Thread(target=self._accept_connections, args=(listener,), daemon=True).start()

    def disconnect(self) -> None:
        """Drop all connections, and refuse new ones."""
        with self._lock:
            self._path.unlink(missing_ok=True)
            for end in [*self._open_sockets, *([self._listener] if self._listener else [])]:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._open_sockets.clear()

    def _accept_connections(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.socket(socket.AF_UNIX)
                with self._lock:
                    self._open_sockets |= {client, server}
                try:
                    server.connect(self._target)
                except OSError:
                    client.close()
                    continue
                last_request = threading.Event()
                threading.Thread(target=self._forward_requests, args=(client, server, last_request), daemon=True).start()
                threading.Thread(target=self._forward_responses, args=(server, client, last_request), daemon=True).start()

    def _forward_requests(self, client: socket.socket, server: socket.socket, last_request: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if _CHANGE_PATTERN.match(data):
                    with self._lock:
                        self.change_count += 1
                        if self.change_count == self._disconnect_after:
                            last_request.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _forward_responses(self, server: socket.socket, client: socket.socket, last_request: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if last_request.is_set():
                    self.disconnect()
                    return
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
