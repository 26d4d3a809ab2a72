"""A wire to an engine that can be cut: a socket before the engine's own, which drops every connection and then refuses."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path

_CHANGE = re.compile(rb"(POST|DELETE) ")


class Forwarder:
    """Forwards `path` to the engine's socket `target`. Use as a context manager; `address` is for DOCKER_HOST."""

    def __init__(self, target: str, path: Path) -> None:
        self._target, self._path = target.removeprefix("unix://"), path
        self.address = f"unix://{path}"
        self.changes = 0
        """Requests so far that change something."""
        self._cut_after: int | None = None
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def __enter__(self) -> Forwarder:
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def heal(self, *, cut_after: int | None = None) -> None:
        """Listen again; with `cut_after`, until that many requests more have changed something, the last one's answer being lost."""
        with self._guard:
            self.changes, self._cut_after = 0, cut_after
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(128)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Drop every connection, and refuse new ones."""
        with self._guard:
            self._path.unlink(missing_ok=True)
            for end in [*self._open, *([self._listener] if self._listener else [])]:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = listener.accept()[0]
                there = socket.socket(socket.AF_UNIX)
                with self._guard:
                    self._open |= {here, there}
                try:
                    there.connect(self._target)
                except OSError:
                    here.close()
                    continue
                last = threading.Event()
                threading.Thread(target=self._forth, args=(here, there, last), daemon=True).start()
                threading.Thread(target=self._back, args=(there, here, last), daemon=True).start()

    def _forth(self, here: socket.socket, there: socket.socket, last: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(1 << 16):
                if _CHANGE.match(data):
                    with self._guard:
                        self.changes += 1
                        if self.changes == self._cut_after:
                            last.set()
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)

    def _back(self, there: socket.socket, here: socket.socket, last: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := there.recv(1 << 16):
                if last.is_set():
                    self.cut()
                    return
                here.sendall(data)
            here.shutdown(socket.SHUT_WR)
