"""Numbers in a file, as an array that is sliced: mapped into memory, or read with patience.

A mapping costs nothing to read from, but where a network's disk loses the file for a moment, whoever looks into it is
killed (SIGBUS). What is read by calls gets an error instead, which is told, and tried again.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmtrain.errors import TrainingError

LOG = logging.getLogger("swarmtrain")
Tokens = npt.NDArray[Any]
_PASSING = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT, errno.ENOTCONN}
_WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try: in all less than other ranks wait for one that is late."""


class Mapped:
    """A file that is mapped into memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int = 0) -> None:
        """The numbers begin at byte `offset`. Raises OSError, or ValueError if what follows is not whole numbers of `dtype`."""
        self.dtype, self._offset = dtype, offset
        with path.open("rb") as file:
            _check(path, os.fstat(file.fileno()).st_size - offset, dtype)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array: Tokens = np.frombuffer(self._map, dtype=dtype, offset=offset)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, where: slice) -> Tokens:
        part: Tokens = self.array[where]
        return part

    def expect(self, first: int, count: int) -> None:
        """Have the operating system read `count` numbers from `first` on meanwhile: they will be asked for soon."""
        start = (self._offset + first * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, start, self._offset + (first + count) * self.dtype.itemsize - start)


class Read:
    """A file that is read when it is asked for a slice; a read that fails is tried again for some seconds."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int = 0) -> None:
        """The numbers begin at byte `offset`. Raises OSError, or ValueError if what follows is not whole numbers of `dtype`."""
        self.dtype, self._path, self._offset = dtype, path, offset
        self._file = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size - offset
        _check(path, self._size, dtype)

    def __len__(self) -> int:
        return self._size // self.dtype.itemsize

    def __getitem__(self, where: slice) -> Tokens:
        first, end, _ = where.indices(len(self))
        data: Tokens = np.frombuffer(
            self._read(self._offset + first * self.dtype.itemsize, self._offset + end * self.dtype.itemsize), dtype=self.dtype
        )
        return data

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def array(self) -> Tokens:
        """All of it, in memory."""
        return self[:]

    def expect(self, first: int, count: int) -> None:
        """Have the operating system read `count` numbers from `first` on meanwhile: they will be asked for soon."""
        os.posix_fadvise(self._file, self._offset + first * self.dtype.itemsize, count * self.dtype.itemsize, os.POSIX_FADV_WILLNEED)

    def _read(self, start: int, end: int) -> bytes:
        failed: OSError | None = None
        for wait in (0.0, *_WAITS):
            time.sleep(wait)
            try:
                if failed:  # a handle that has gone stale stays so
                    self._open()
                return b"".join(self._pieces(start, end))
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                failed = error
                LOG.warning("%s: %s; trying again", self._path, error.strerror)
        raise TrainingError(
            f"{self._path}: {failed and failed.strerror}", place="config data", hint="is the disk gone? the run goes on from its checkpoint"
        )

    def _open(self) -> None:
        before, self._file = self._file, os.open(self._path, os.O_RDONLY)
        os.close(before)

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        while start < end:
            piece = os.pread(self._file, min(end - start, 1 << 30), start)
            if not piece:
                raise OSError(errno.EIO, "ends before it should")
            yield piece
            start += len(piece)


def _check(path: Path, size: int, dtype: np.dtype[Any]) -> None:
    if size <= 0 or size % dtype.itemsize:
        raise ValueError(f"{path.name} is empty" if size <= 0 else f"{path.name} ends within a number: {size} bytes of {dtype}")
