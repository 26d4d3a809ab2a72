"""What a node prints, written down line by line, each with its time: a file by itself does not know when."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

_AT_ONCE = 1 << 16
_LONGEST = 1 << 20
_LAST_WORDS = 1.0


def head(seconds: float) -> str:
    """Return how a line begins that was printed at `seconds` since the epoch: its time as Docker writes it."""
    return f"{datetime.fromtimestamp(seconds, UTC).isoformat(timespec='microseconds').removesuffix('+00:00')}Z "


@contextlib.contextmanager
def written_down(path: Path) -> Iterator[IO[bytes]]:
    """Yield what a process may print to; its lines are appended to `path`. At the end they are all there.

    What the process leaves behind may print on: it is listened to for a second more, and then as long as this process lives.
    """
    reading, writing = os.pipe()
    reader = threading.Thread(target=_append, args=(reading, path), daemon=True)
    with os.fdopen(writing, "wb", buffering=0) as pipe:
        reader.start()
        yield pipe
    reader.join(_LAST_WORDS)


def _append(reading: int, path: Path) -> None:
    with os.fdopen(reading, "rb", buffering=0) as pipe, path.open("ab", buffering=0) as log:
        rest = b""
        while chunk := pipe.read(_AT_ONCE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], b""
            _write(log, lines)
        _write(log, [rest] if rest else [])


def _write(log: IO[bytes], lines: list[bytes]) -> None:
    before = head(time.time()).encode()
    # A full disk is no reason to stop the process, which would wait for ever to be read.
    with contextlib.suppress(OSError):
        log.write(b"".join(before + line + b"\n" for line in lines))
