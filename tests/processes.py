"""The processes of local runs, identified by environment and command line, whatever their parents are."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def find_run_pids(state_dir: Path) -> list[int]:
    """Return the pids of all living processes of runs whose folders are below `state_dir`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if str(state_dir).encode() in environment and not dead and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def read_command_line(pid: int) -> list[str]:
    """Return the words of a process's command line: none if it has ended, which it may do at any moment."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    return []
