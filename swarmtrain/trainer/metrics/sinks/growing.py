"""A file that grows by whole pieces, on a disk that may be full."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError

LOG = logging.getLogger("swarmtrain")


class GrowingFile:
    """Pieces at the end of a file: each of them stands whole, or not at all."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Begin the file with `content`. Raises TrainingError.

        By rename, so that a world that was cut off goes on writing into a file that nobody sees.
        """
        self.path = path
        self._told = False
        self._file = self._end = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(content)
        except OSError as error:
            hint = "the user that trains needs write access to it"
            raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.log_dir", hint=hint) from None

    @property
    def end(self) -> int:
        """Bytes that stand."""
        return self._end

    def append(self, piece: bytes, at: int | None = None) -> bool:
        """Add `piece`; with `at`, in place of what stands from there on. Return whether it stands.

        A disk that takes none is told once, and training goes on.
        """
        at = self._end if at is None else at
        try:
            os.ftruncate(self._file, at)
            self._end = at
            if os.pwrite(self._file, piece, at) < len(piece):
                os.ftruncate(self._file, at)
                return self._failed("no space is left")
        except OSError as error:
            return self._failed(reason(error))
        self._end = at + len(piece)
        return True

    def replace(self, content: bytes) -> bool:
        """Begin the file anew with `content`. Return whether that could be done; if not, the file is as it was."""
        before = self._file
        try:
            self._begin(content)
        except OSError as error:
            return self._failed(reason(error))
        os.close(before)
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _begin(self, content: bytes) -> None:
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            aside.write_bytes(content)
            file = os.open(aside, os.O_RDWR)
            aside.replace(self.path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        self._file, self._end = file, len(content)

    def _failed(self, why: str) -> bool:
        if not self._told:
            LOG.warning("%s: no more metrics while it cannot be written: %s", self.path, why)
        self._told = True
        return False
