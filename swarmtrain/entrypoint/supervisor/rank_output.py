"""Copies the output of a node's ranks from their log files to the node's own output: whole lines, each with the number of its rank.

A carriage return replaces what its line contained before, as on a terminal. Of a progress bar, which is a line that has not ended yet, the
state is printed at most once per second, with INTERIM_SUFFIX, and its last state as a line.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from swarmtrain.protocol import INTERIM_SUFFIX

_POLL_SECONDS = 0.1
_INTERIM_SECONDS = 1.0
_CHUNK_BYTES = 1 << 20


class RankOutput:
    """Thread that copies the lines that are appended to files.

    `files`: prefix and target descriptor for the lines of each file, by its path.
    """

    def __init__(self, files: Mapping[str, tuple[str, int]]) -> None:
        self._copiers = [_LineCopier(Path(path), prefix.encode(), target) for path, (prefix, target) in files.items()]
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._copy_lines, name="rank-output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Copy what the files contain by now, also a last line without an end, and end the thread."""
        self._stop_requested.set()
        self._thread.join()

    def _copy_lines(self) -> None:
        while not self._stop_requested.wait(_POLL_SECONDS):
            for copier in self._copiers:
                copier.copy_new_lines()
        for copier in self._copiers:
            copier.copy_rest()


class _LineCopier:
    """Copies the complete lines of one file."""

    def __init__(self, path: Path, prefix: bytes, target: int) -> None:
        self._path, self._prefix, self._target = path, prefix, target
        self._file: IO[bytes] | None = None
        self._open_line = b""
        """What the file contains after its last complete line; of a progress bar, its last state."""
        self._next_interim_at, self._interim_line = 0.0, b""

    def copy_new_lines(self) -> None:
        """Copy the lines that are complete by now, or the state of a progress bar."""
        try:
            self._file = self._file or self._path.open("rb")
        except FileNotFoundError:
            return  # its rank has not started yet
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, self._open_line = (self._open_line + chunk).split(b"\n")
            self._write_lines(lines)
            if b"\r" in self._open_line:
                self._open_line = b"\r" + _read_last_state(self._open_line) + b"\r"[: self._open_line.endswith(b"\r")]
        if self._open_line.startswith(b"\r") and self._open_line != self._interim_line and time.monotonic() >= self._next_interim_at:
            self._next_interim_at, self._interim_line = time.monotonic() + _INTERIM_SECONDS, self._open_line
            self._write_lines([self._open_line + INTERIM_SUFFIX.encode()])

    def copy_rest(self) -> None:
        """Copy all lines, also a last one without an end, and close the file."""
        self._next_interim_at = float("inf")
        self.copy_new_lines()
        if self._open_line:
            self._write_lines([self._open_line])
        if self._file:
            self._file.close()

    def _write_lines(self, lines: Iterable[bytes]) -> None:
        content = memoryview(b"".join(b"%b%b\n" % (self._prefix, _read_last_state(line)) for line in lines))
        with suppress(OSError):  # such as a full disk: these lines are only in the rank's log file, but later ones are printed
            while content:
                content = content[os.write(self._target, content) :]


def _read_last_state(line: bytes) -> bytes:
    """Return what a terminal shows of `line`: the text after the last carriage return that is followed by text."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
