"""File to which records are appended, without partial records even if the disk becomes full."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import TrainingError

LOG = logging.getLogger("swarmtrain")


class RecordFile:
    """File of appended records. A record is written completely or not at all."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Create the file `path` with `content`. Raises TrainingError if it cannot be written.

        The file is created under another name and then renamed: a process of an earlier world that still runs writes to an unlinked file.
        """
        self.path = path
        self._has_warned = False
        self._fd = self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._create_file(content)
        except OSError as error:
            hint = "give the training user write access to it"
            raise TrainingError(f"{error.filename}: {describe_os_error(error)}", place="config logger.log_dir", hint=hint) from None

    @property
    def size(self) -> int:
        """Size in bytes of the complete records."""
        return self._size

    def append_bytes(self, data: bytes, offset: int | None = None) -> bool:
        """Append `data`, or if `offset` is given, replace everything from this byte offset. Return whether `data` was written.

        The first write error is logged as a warning, and training continues.
        """
        offset = self._size if offset is None else offset
        try:
            os.ftruncate(self._fd, offset)
            self._size = offset
            if os.pwrite(self._fd, data, offset) < len(data):
                os.ftruncate(self._fd, offset)
                return self._log_write_error_once("no space is left")
        except OSError as error:
            return self._log_write_error_once(describe_os_error(error))
        self._size = offset + len(data)
        return True

    def replace_content(self, content: bytes) -> bool:
        """Replace the content of the file. Return whether this succeeded; if not, the file is unchanged."""
        previous_fd = self._fd
        try:
            self._create_file(content)
        except OSError as error:
            return self._log_write_error_once(describe_os_error(error))
        os.close(previous_fd)
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _create_file(self, content: bytes) -> None:
        staging = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            staging.write_bytes(content)
            fd = os.open(staging, os.O_RDWR)
            staging.replace(self.path)
        except OSError:
            staging.unlink(missing_ok=True)
            raise
        self._fd, self._size = fd, len(content)

    def _log_write_error_once(self, message: str) -> bool:
        if not self._has_warned:
            LOG.warning("%s: cannot be written, so metrics are lost: %s", self.path, message)
        self._has_warned = True
        return False
