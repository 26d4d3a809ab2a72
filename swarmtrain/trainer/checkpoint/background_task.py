"""Background threads that write a checkpoint while training continues.

    training thread     copies this rank's part into memory, and continues to train
    writing thread      writes the part, then its size and hash to the completion marker part-00001.json
    commit thread       on rank 0: waits for the completion markers of all ranks, merges them into the manifest, and commits; if each
                        node has its own disk, one rank of each node does this: see storage_backend.py

The threads use none of training's process groups: they synchronize through files in the folder, which all these ranks can read. They are
daemon threads: a process whose training has failed exits at once, and its incomplete files are ignored.
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
FileDigests = dict[str, dict[str, Any]]
_POLL_SECONDS = 0.05
_VISIBILITY_TIMEOUT_SECONDS = 10.0


class BackgroundTask(Generic[T]):
    """A function call that runs in its own thread, and its result."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True if the call has ended, with a result or an error."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if the call has raised an error."""
        return self._error is not None

    def wait_until_done(self, timeout_seconds: float | None = None) -> None:
        """Wait until the call has ended, for at most `timeout_seconds` seconds; None: without limit."""
        self._thread.join(timeout_seconds)

    def result(self) -> T:
        """Wait until the call has ended, and return its result. Raises the call's error if it failed."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._action())
        except BaseException as error:  # noqa: BLE001  # result() raises it
            self._error = error


def write_completion_marker(folder: Path, rank: int, files: FileDigests) -> None:
    """Write the completion marker of `rank` to `folder`. Raises OSError.

    The marker shows that the rank's part is written, and contains the digests of its `files`.
    """
    temporary_path = folder / f".{_format_marker_name(rank)}"
    temporary_path.write_text(json.dumps(files))
    temporary_path.rename(folder / _format_marker_name(rank))


def collect_completion_markers(folder: Path, ranks: Iterable[int], all_written: threading.Event) -> FileDigests:
    """Wait for the completion markers of `ranks`, remove them, and return the file digests that they contain.

    Raises CheckpointError if a marker does not appear within 10 s after `all_written` is set, OSError if `folder` does not exist.
    """
    expected_names, deadline = {_format_marker_name(rank) for rank in ranks}, float("inf")
    # Listing the folder makes a network file system look again; looking up a name may return a cached miss.
    while missing := expected_names - set(os.listdir(folder)):  # noqa: PTH208  # only names are needed
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{min(missing)}, written by another node, is not visible on this node",
                place=f"config trainer.save_dir {folder.parent}",
                hint=fence.NOT_SHARED_HINT,
            )
        if all_written.wait(_POLL_SECONDS):
            deadline = min(deadline, time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS)
            time.sleep(_POLL_SECONDS / 10)
    files: FileDigests = {}
    for name in sorted(expected_names):
        files |= json.loads((folder / name).read_text())
        (folder / name).unlink()
    return files


def _format_marker_name(rank: int) -> str:
    return f"part-{rank:05}.json"
