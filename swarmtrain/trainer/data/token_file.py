"""Arrays of numbers in a file that is either memory-mapped, or read by system calls with retries.

Memory-mapped data is read without system calls. But if a network file system is briefly unavailable, a process that accesses mapped
data is killed by SIGBUS. With read calls, the error is logged and the read is retried.
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

from swarmtrain.config.user_files import check_regular_file, open_regular_file
from swarmtrain.errors import TrainingError

LOG = logging.getLogger("swarmtrain")
Tokens = npt.NDArray[Any]
_TRANSIENT_ERRNOS = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT, errno.ENOTCONN}
_RETRY_DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each retry. Their sum is less than the timeout after which other ranks stop waiting for this rank."""


class MappedArray:
    """Array in a memory-mapped file."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int = 0) -> None:
        """Map the file `path`. Its array of `dtype` begins at byte `offset` and ends with the file.

        Raises OSError if the file cannot be read, ValueError if the array is empty or the file ends within a value.
        """
        self.dtype, self._offset = dtype, offset
        with open_regular_file(path) as file:
            _check_file_size(path, os.fstat(file.fileno()).st_size - offset, dtype)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array: Tokens = np.frombuffer(self._map, dtype=dtype, offset=offset)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: slice) -> Tokens:
        values: Tokens = self.array[index]
        return values

    def prefetch_range(self, first_index: int, count: int) -> None:
        """Request read-ahead (MADV_WILLNEED) of `count` values, beginning at index `first_index`."""
        start = (self._offset + first_index * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, start, self._offset + (first_index + count) * self.dtype.itemsize - start)


class PreadArray:
    """Array in a file. Slices are read with pread. After a transient error, a read is retried up to 4 times, after 0.5 to 4 s."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int = 0) -> None:
        """Open the file `path`. Its array of `dtype` begins at byte `offset` and ends with the file.

        Raises OSError if the file cannot be read, ValueError if the array is empty or the file ends within a value.
        """
        self.dtype, self._path, self._offset = dtype, path, offset
        check_regular_file(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        self._byte_count = os.fstat(self._descriptor).st_size - offset
        _check_file_size(path, self._byte_count, dtype)

    def __len__(self) -> int:
        return self._byte_count // self.dtype.itemsize

    def __getitem__(self, index: slice) -> Tokens:
        first, end, _ = index.indices(len(self))
        values: Tokens = np.frombuffer(
            self._read_bytes(self._offset + first * self.dtype.itemsize, self._offset + end * self.dtype.itemsize), dtype=self.dtype
        )
        return values

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def array(self) -> Tokens:
        """The whole array, read into memory."""
        return self[:]

    def prefetch_range(self, first_index: int, count: int) -> None:
        """Request read-ahead (POSIX_FADV_WILLNEED) of `count` values, beginning at index `first_index`."""
        os.posix_fadvise(
            self._descriptor, self._offset + first_index * self.dtype.itemsize, count * self.dtype.itemsize, os.POSIX_FADV_WILLNEED
        )

    def _read_bytes(self, start: int, end: int) -> bytes:
        last_error: OSError | None = None
        for delay in (0.0, *_RETRY_DELAYS_SECONDS):
            time.sleep(delay)
            try:
                if last_error:  # a stale file handle must be reopened
                    self._reopen_file()
                return b"".join(self._iterate_byte_chunks(start, end))
            except OSError as error:
                if error.errno not in _TRANSIENT_ERRNOS:
                    raise
                last_error = error
                LOG.warning("%s: %s; retrying", self._path, error.strerror)
        raise TrainingError(
            f"{self._path}: cannot be read: {last_error and last_error.strerror}",
            place="config data",
            hint="check that the disk is mounted; a restarted run resumes from its newest checkpoint",
        )

    def _reopen_file(self) -> None:
        old_descriptor, self._descriptor = self._descriptor, os.open(self._path, os.O_RDONLY)
        os.close(old_descriptor)

    def _iterate_byte_chunks(self, start: int, end: int) -> Iterator[bytes]:
        while start < end:
            piece = os.pread(self._descriptor, min(end - start, 1 << 30), start)
            if not piece:
                raise OSError(errno.EIO, "is truncated")
            yield piece
            start += len(piece)


def _check_file_size(path: Path, size: int, dtype: np.dtype[Any]) -> None:
    if size <= 0 or size % dtype.itemsize:
        raise ValueError(
            f"{path.name} is empty" if size <= 0 else f"{path.name} is truncated: {size} bytes is not a multiple of the size of {dtype}"
        )
