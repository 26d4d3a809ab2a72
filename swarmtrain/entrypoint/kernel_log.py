"""New lines of the machine's kernel log, if this container can read it. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

KERNEL_LOG_VARIABLE = "SWARMTRAIN_KERNEL_LOG"
_DEFAULT_PATHS = ("/dev/kmsg", "/var/log/kern.log", "/var/log/syslog", "/var/log/messages")
_MAX_READ_BYTES = 1 << 20


class KernelLog:
    """The kernel log: /dev/kmsg, or a file that a log daemon writes; the first that can be read, or the one that the environment names."""

    def __init__(self, environ: Mapping[str, str], *, from_start: bool = False) -> None:
        """Open the log at its end, or, with `from_start`, at its start. A log that cannot be read has no lines."""
        configured_path = environ.get(KERNEL_LOG_VARIABLE)
        self._descriptor: int | None = None
        self._remainder = b""
        for path in map(Path, [configured_path] if configured_path else _DEFAULT_PATHS):
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._path = path
                if not from_start:
                    os.lseek(self._descriptor, 0, os.SEEK_END)
                return

    @property
    def is_readable(self) -> bool:
        """Whether a kernel log was found."""
        return self._descriptor is not None

    def read_new_lines(self) -> list[str]:
        """Return the complete lines since the last call. A file that has been rotated is opened again."""
        data = self._remainder + self._read_available()
        if self._was_file_replaced():
            self._reopen_file()
            data += self._read_available()
        *lines, self._remainder = data.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def _read_available(self) -> bytes:
        if self._descriptor is None:
            return b""
        chunks: list[bytes] = []
        with contextlib.suppress(OSError):  # /dev/kmsg: no more records, or records that were overwritten before they were read
            while (chunk := os.read(self._descriptor, _MAX_READ_BYTES)) and sum(map(len, chunks)) < _MAX_READ_BYTES:
                chunks.append(chunk)
        return b"".join(chunks)

    def _was_file_replaced(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return False

    def _reopen_file(self) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = descriptor
