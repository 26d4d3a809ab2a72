"""Digests of the files of a checkpoint, which several threads can compute together.

A file is divided into pieces of 1 MiB, each piece is hashed with SHA-256, and the digest of the file is the SHA-256 of the digests of its
pieces, one after another. With one SHA-256 of the whole file, a single core would have to hash all bytes in their order.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from swarmtrain.config.user_files import open_regular_file

FileDigests = dict[str, dict[str, Any]]
"""Size in bytes and digest of each file, by file name."""
_DIGEST_KEY = "sha256_of_pieces"
_WHOLE_FILE_KEY = "sha256"
"""Key in manifests of format 2: SHA-256 of the whole file."""
_PIECE_BYTES = 1 << 20
"""Part of the format of checkpoints. Small enough for the cache of a core: a piece is read, then hashed."""
_TASK_BYTES = 64 * _PIECE_BYTES
_MAX_THREADS = 4


class FileHasher:
    """Computes the digest of one file.

    Call either `update` with all its bytes in their order, or `find_piece` for each piece, whose bytes any thread can hash.
    """

    def __init__(self, expected: Mapping[str, Any] | None = None) -> None:
        """`expected`: entry of the file in a manifest, which tells how its digest was computed; None: as for new manifests."""
        self.piece_bytes = sys.maxsize if expected is not None and _WHOLE_FILE_KEY in expected else _PIECE_BYTES
        self._expected = expected
        self._pieces: list[hashlib._Hash] = []
        self._size = 0

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the file."""
        while data:
            length = self.piece_bytes - self._size % self.piece_bytes
            part, data = data[:length], data[length:]
            self.find_piece(self._size).update(part)
            self._size += len(part)

    def find_piece(self, offset: int) -> hashlib._Hash:
        """Return the hash of the piece that contains the byte at `offset`. The caller hashes the bytes of a piece in their order.

        Not thread-safe while the piece, or one before it, has never been asked for.
        """
        while len(self._pieces) <= offset // self.piece_bytes:
            self._pieces.append(hashlib.sha256())
        return self._pieces[offset // self.piece_bytes]

    def build_entry(self, size: int) -> dict[str, Any]:
        """Return the entry of the file, of `size` bytes, for a new manifest."""
        return {"size": size, _DIGEST_KEY: hashlib.sha256(b"".join(piece.digest() for piece in self._pieces)).hexdigest()}

    def matches(self) -> bool:
        """Return whether the bytes hashed so far have the digest of the expected entry. Raises KeyError if that has none."""
        expected = self._expected or {}
        if _WHOLE_FILE_KEY in expected:
            return bool(self.find_piece(0).hexdigest() == expected[_WHOLE_FILE_KEY])
        return bool(self.build_entry(0)[_DIGEST_KEY] == expected[_DIGEST_KEY])


def hash_file(path: Path, expected: Mapping[str, Any] | None = None) -> FileHasher:
    """Hash the file at `path`, by several threads. `expected`: as of FileHasher. Raises OSError if it cannot be read."""
    with open_regular_file(path, buffering=0) as file:

        def read(start: int, end: int) -> memoryview:
            memory = memoryview(bytearray(end - start))
            return memory[: read_into(memory, file.fileno(), start)]

        return _hash_by_threads(os.fstat(file.fileno()).st_size, read, expected)


def hash_memory(data: memoryview) -> FileHasher:
    """Hash `data`, all bytes of a file, by several threads."""
    return _hash_by_threads(len(data), lambda start, end: data[start:end], None)


def read_into(memory: memoryview, descriptor: int, offset: int) -> int:
    """Read the bytes at `offset` of an open file into `memory`, and return their number, which is lower if the file ends before."""
    count = 0
    while count < len(memory) and (read := _read_some_into(memory[count:], descriptor, offset + count)):
        count += read
    return count


def get_digest(entry: Mapping[str, Any]) -> str:
    """Return the digest in the entry of a file, as hexadecimal digits. Raises KeyError if it has none."""
    digest: str = entry[_WHOLE_FILE_KEY] if _WHOLE_FILE_KEY in entry else entry[_DIGEST_KEY]
    return digest


def _hash_by_threads(size: int, read: Callable[[int, int], memoryview], expected: Mapping[str, Any] | None) -> FileHasher:
    """Hash `size` bytes; read(start, end) returns a part of them."""
    hasher = FileHasher(expected)
    task_bytes = max(_TASK_BYTES, hasher.piece_bytes)
    if size:
        hasher.find_piece(size - 1)

    def hash_part(start: int) -> None:
        for offset in range(start, min(start + task_bytes, size), _PIECE_BYTES):
            hasher.find_piece(offset).update(read(offset, min(offset + _PIECE_BYTES, size)))

    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        list(pool.map(hash_part, range(0, size, task_bytes)))
    return hasher


def _read_some_into(memory: memoryview, descriptor: int, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory], offset)
    data = os.pread(descriptor, len(memory), offset)  # on systems without preadv
    memory[: len(data)] = data
    return len(data)
