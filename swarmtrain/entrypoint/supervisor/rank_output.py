"""Copies the output of a node's ranks from their log files to the node's own output: whole lines, each with the number of its rank.

A carriage return replaces what its line contained before, as on a terminal: of a progress bar, its last state is printed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20


class RankOutput:
    """Thread that copies the lines that are appended to files. `files`: for each file its path, the prefix of its lines, and the
    descriptor to which it is copied.
    """

    def __init__(self, files: Mapping[str, tuple[str, int]]) -> None:
        self._lines = [_LineReader(path, prefix, target) for path, (prefix, target) in files.items()]
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
        is_last = False
        while not is_last:
            is_last = self._stop_requested.wait(_POLL_SECONDS)
            for line_reader in self._lines:
                line_reader.copy_new_lines(is_last=is_last)
        for line_reader in self._lines:
            line_reader.close()


class _LineReader:
    """One file whose complete lines are copied."""

    def __init__(self, path: str, prefix: str, target: int) -> None:
        self._path, self._prefix, self._target = Path(path), prefix.encode(), target
        self._file: IO[bytes] | None = None
        self._partial_line = bytearray()

    def copy_new_lines(self, *, is_last: bool) -> None:
        try:
            self._file = self._file or self._path.open("rb")
        except FileNotFoundError:
            return  # its rank has not started yet
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, rest = (self._partial_line + chunk).split(b"\n")
            self._partial_line = rest
            self._write_lines(lines)
        if is_last and self._partial_line:
            self._write_lines([self._partial_line])

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _write_lines(self, lines: list[bytearray]) -> None:
        content = memoryview(b"".join(b"%b%b\n" % (self._prefix, _collapse_carriage_returns(line)) for line in lines))
        while content:
            content = content[os.write(self._target, content) :]


def _collapse_carriage_returns(line: bytearray) -> bytes:
    """Return what a terminal shows of `line`, if each carriage return starts it anew."""
    return bytes(line).rstrip(b"\r").rpartition(b"\r")[2]
