"""What was seen of a run, kept in the user's state directory: Swarm forgets the logs of a container after five restarts.

For reading afterwards only: nothing is ever decided by it, and where it cannot be written nothing else suffers.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import IO

from swarmtrain.launchers.swarm.logs import Line

_TAIL = 64 * 1024
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+Z ")


def directory(run: str) -> Path:
    """Return the folder that holds `run`'s events and logs, whether or not it is there."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "swarmtrain" / run


class Record:
    """Appends to NODE.log and, what the board says, to events.jsonl. What an earlier watch has written is not written again."""

    def __init__(self, run: str) -> None:
        self._directory = directory(run)
        self._files: dict[str, IO[str]] = {}
        self._until: dict[str, str] = {}
        self._broken = False

    def add(self, line: Line) -> None:
        """Write one line down, if that is possible."""
        if self._broken or not line.time:
            return
        try:
            log = self._file(f"{line.node}.log")
            if line.time > self._until[f"{line.node}.log"]:
                log.write(f"{line.time} {line.text}\n")
                if line.event() is not None:
                    self._file("events.jsonl").write(f"{line.text}\n")
        except OSError:
            self._broken = True

    def flush(self) -> None:
        """Hand everything to the system."""
        try:
            for file in self._files.values():
                file.flush()
        except OSError:
            self._broken = True

    def close(self) -> None:
        """Close the files."""
        self.flush()
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _file(self, name: str) -> IO[str]:
        if name not in self._files:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / name
            self._until[name] = _last_time(path)
            self._files[name] = path.open("a", encoding="utf-8")
        return self._files[name]


def _last_time(log: Path) -> str:
    """Return the time at the head of the log's last line."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    times = [line.partition(" ")[0] for line in lines if _TIME.match(line)]
    return times[-1] if times else ""
