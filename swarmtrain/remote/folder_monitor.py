"""Detect that somebody has deleted the folder of a run, whose processes no command can find any more."""

from __future__ import annotations

import os
import time
from pathlib import Path

CHECK_SECONDS = 10.0
_REQUIRED_CHECKS = 3


class FolderMonitor:
    """Detects that a folder was deleted. A folder that was renamed, or that is on a failing disk or an unmounted share, was not."""

    def __init__(self, folder: Path, check_seconds: float = CHECK_SECONDS) -> None:
        """`folder` must exist. Raises OSError if it cannot be read."""
        self._folder, self._check_seconds = folder.absolute(), check_seconds
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._identity = _get_identity(os.fstat(self._descriptor))
        self._parent_identities = {parent: _get_identity(parent.stat()) for parent in self._folder.parents}
        self._missing_count, self._next_check_at = 0, time.monotonic() + check_seconds

    def is_deleted(self) -> bool:
        """Return whether three checks in a row have found that the folder was deleted. A check is made every 10 s."""
        now = time.monotonic()
        if now >= self._next_check_at:
            self._next_check_at = now + self._check_seconds
            self._missing_count = self._missing_count + 1 if self._check_deleted() else 0
        return self._missing_count >= _REQUIRED_CHECKS

    def _check_deleted(self) -> bool:
        try:
            if os.fstat(self._descriptor).st_nlink:
                return False
        except OSError:  # a network file system does not know the folder any more
            pass
        try:
            if _get_identity(self._folder.stat()) == self._identity:
                return False
        except FileNotFoundError:
            pass
        except OSError:
            return False
        return self._is_parent_intact()

    def _is_parent_intact(self) -> bool:
        """Return whether the nearest parent folder that exists is readable, and the same as before, on the same file system."""
        for parent, identity in self._parent_identities.items():
            try:
                current_identity = _get_identity(parent.stat())
                next(parent.iterdir(), None)
            except FileNotFoundError:
                continue
            except OSError:
                return False
            return current_identity == identity and identity[0] == self._identity[0]
        return False


def _get_identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
