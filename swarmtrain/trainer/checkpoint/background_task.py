"""Background threads that write a checkpoint while training continues.

    training thread     copies this rank's shard into host memory, and continues to train
    writing thread      writes the shard, then writes its size and SHA-256 to a completion marker, such as part-00001.json
    commit thread       on rank 0: waits for the completion markers of all ranks, merges them into the manifest, and commits; if each
                        node has its own disk, one rank of each node does this: see storage/storage_backend.py

The background threads do not use the process groups of training: they synchronize through the completion markers in the staging folder.
They are daemon threads, so a process whose training has failed exits at once. Its incomplete files are ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """A function call in a separate thread. Stores the result of the call, or the error that it raises."""

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

    def wait_until_done(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, for at most `timeout` seconds. None: no time limit."""
        self._thread.join(timeout)

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
