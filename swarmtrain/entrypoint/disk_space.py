"""Free space of the disks to which a node writes: its checkpoints and its logs. Standard library only."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from swarmtrain.protocol import EVENT_DISK_NEARLY_FULL, Event

NEARLY_FULL_FRACTION = 0.05
NEARLY_FULL_BYTES = 100 * 10**9
"""A disk is nearly full if less than this fraction of it is free, and less than these bytes: 5 % of a large disk is much."""
_RECOVERY_FACTOR = 2
"""A disk is no longer nearly full once this multiple of the limit is free, so that a value around the limit is one report."""


class DiskMonitor:
    """Finds the disks of `folders` that are nearly full, each once until it has space again."""

    def __init__(self, node: str, folders: Iterable[Path], read_usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage) -> None:
        """`read_usage`: returns the total, used and free bytes of the file system of a path, as shutil.disk_usage does."""
        self._node, self._folders, self._read_usage = node, list(dict.fromkeys(folders)), read_usage
        self._reported: set[Path] = set()

    def find_nearly_full(self) -> list[Event]:
        """Return an event for each disk that has become nearly full since the last call."""
        return [event for folder in self._list_folders_by_disk() if (event := self._check_folder(folder))]

    def _list_folders_by_disk(self) -> list[Path]:
        """Return the first folder on each disk."""
        first: dict[int, Path] = {}
        for folder in self._folders:
            with contextlib.suppress(OSError):
                first.setdefault(_find_existing_folder(folder).stat().st_dev, folder)
        return list(first.values())

    def _check_folder(self, folder: Path) -> Event | None:
        try:
            total, _, free = self._read_usage(_find_existing_folder(folder))
        except OSError:
            return None
        limit = min(NEARLY_FULL_FRACTION * total, NEARLY_FULL_BYTES)
        if free >= limit:
            if free >= _RECOVERY_FACTOR * limit:
                self._reported.discard(folder)
            return None
        if folder in self._reported:
            return None
        self._reported.add(folder)
        message = f"the disk of {folder} on {self._node} is nearly full: {_format_size(free)} of {_format_size(total)} are free"
        return Event(EVENT_DISK_NEARLY_FULL, {"node": self._node, "path": str(folder), "free": free, "total": total, "message": message})


def list_written_folders(config_path: str) -> list[Path]:
    """Return the folders to which a run with the config file `config_path` writes; none if the file cannot be read."""
    try:
        config = json.loads(Path(config_path).read_text(encoding="utf-8"))
        folders = [config["trainer"]["save_dir"], config["logger"]["log_dir"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [Path(folder) for folder in folders if folder]


def _find_existing_folder(folder: Path) -> Path:
    """Return `folder`, or its nearest parent that exists: the run may not have written anything yet."""
    absolute = folder.absolute()
    return next((path for path in (absolute, *absolute.parents) if path.exists()), absolute)


def _format_size(size: float) -> str:
    return f"{size / 1e12:.1f} TB" if size >= 1e12 else f"{size / 1e9:.1f} GB"
