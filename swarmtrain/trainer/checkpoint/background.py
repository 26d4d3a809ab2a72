"""Checkpoints that are written while training goes on.

    training thread     copies this rank's part into memory, and trains on
    writing thread      writes the part, and its size and hash beside it as part-00001.json
    rank 0, a second    waits until every rank's note is there, puts all into the manifest, and commits; or, where each
                        node has its own disk, one rank of each: see disks.py

The threads use no collective of training's process groups: they meet in the folder, which all these ranks see. They are
daemons: a process whose training has failed ends at once, and what is half written counts for nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import fence

T = TypeVar("T")
Files = dict[str, dict[str, Any]]
_POLL = 0.05
_SEEN_WITHIN = 10.0


class Background(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act = act
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True if there is a result, or an error."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True if it has raised an error."""
        return self._error is not None

    def end(self, seconds: float | None = None) -> None:
        """Wait for the call to end, whatever has become of it; if they are given, for so many `seconds` at most."""
        self._thread.join(seconds)

    def result(self) -> T:
        """Wait for the call to end, and return what it has. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._act())
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is asked for
            self._error = error


def leave_note(folder: Path, rank: int, files: Files) -> None:
    """Say in `folder` that the part of `rank` is written. Raises OSError."""
    aside = folder / f".{_note(rank)}"
    aside.write_text(json.dumps(files))
    aside.rename(folder / _note(rank))


def collect_notes(folder: Path, ranks: Iterable[int], all_left: threading.Event) -> Files:
    """Wait for the notes of `ranks`, take them away and return what they say.

    Raises CheckpointError if `all_left` is set and one is not to be seen within seconds, OSError if `folder` is gone.
    """
    wanted, deadline = {_note(rank) for rank in ranks}, float("inf")
    # A listing asks a network's file system anew, where a look for the name may be answered with an old no.
    while missing := wanted - set(os.listdir(folder)):  # noqa: PTH208  # names are all that is wanted
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{min(missing)}, written by another node, is not to be seen here",
                place=f"config trainer.save_dir {folder.parent}",
                hint=fence.NOT_SHARED,
            )
        if all_left.wait(_POLL):
            deadline = min(deadline, time.monotonic() + _SEEN_WITHIN)
            time.sleep(_POLL / 10)
    files: Files = {}
    for name in sorted(wanted):
        files |= json.loads((folder / name).read_text())
        (folder / name).unlink()
    return files


def _note(rank: int) -> str:
    return f"part-{rank:05}.json"
