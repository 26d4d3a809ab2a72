"""Log file of a node's output, with a timestamp added to each line."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from swarmtrain.atomic_file import open_private_file

_MAX_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20
_DRAIN_TIMEOUT_SECONDS = 1.0


def format_timestamp_prefix(timestamp: float) -> str:
    """Return the timestamp prefix of a line printed at `timestamp` (seconds since the epoch), in Docker's format."""
    return f"{datetime.fromtimestamp(timestamp, timezone.utc).replace(tzinfo=None).isoformat(timespec='microseconds')}Z "


@contextlib.contextmanager
def open_timestamped_log(path: Path) -> Iterator[IO[bytes]]:
    """Yield a pipe for the output of a process; its lines are appended to the log `path`.

    On exit, the context manager waits until all writers have closed the pipe, for at most 1 s. Descendants of the process may print
    later: their output is appended as long as this process lives.
    """
    read_fd, write_fd = os.pipe()
    reader = threading.Thread(target=_copy_pipe_to_log, args=(read_fd, path), daemon=True)
    with os.fdopen(write_fd, "wb", buffering=0) as pipe:
        reader.start()
        yield pipe
    reader.join(_DRAIN_TIMEOUT_SECONDS)


def _copy_pipe_to_log(read_fd: int, path: Path) -> None:
    with os.fdopen(read_fd, "rb", buffering=0) as pipe, open_private_file(path, "ab", buffering=0) as log:
        partial_line = b""
        while chunk := pipe.read(_MAX_READ_BYTES):
            *lines, partial_line = (partial_line + chunk).split(b"\n")
            if len(partial_line) > _MAX_LINE_BYTES:
                lines, partial_line = [*lines, partial_line], b""
            _write_timestamped_lines(log, lines)
        _write_timestamped_lines(log, [partial_line] if partial_line else [])


def _write_timestamped_lines(log: IO[bytes], lines: list[bytes]) -> None:
    prefix = format_timestamp_prefix(time.time()).encode()
    # Ignore a full disk and keep reading: otherwise the process would block forever on the full pipe.
    with contextlib.suppress(OSError):
        log.write(b"".join(prefix + line + b"\n" for line in lines))
