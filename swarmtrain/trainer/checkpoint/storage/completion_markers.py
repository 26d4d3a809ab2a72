"""Completion markers: JSON files in a staging folder. The marker of a rank shows that its shard of the checkpoint is written.

Background threads, and the surviving ranks after a peer has failed, have no process group through which they can synchronize. But all
ranks that write to a disk can read the staging folder on this disk.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from swarmtrain.atomic_file import write_text_atomically
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint.file_digests import FileDigests
from swarmtrain.trainer.checkpoint.storage import fence

_POLL_SECONDS = 0.05
_VISIBILITY_TIMEOUT_SECONDS = 10.0


def write_completion_marker(folder: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Write the completion marker of `rank`, with `content`, to `folder`. Raises OSError if it cannot be written."""
    write_text_atomically(folder / _format_marker_name(rank), json.dumps(content))


def find_missing_markers(folder: Path, ranks: Collection[int]) -> set[str]:
    """Return the names of the completion markers of `ranks` that are not in `folder`. Raises OSError if `folder` does not exist."""
    # Listing the folder makes a network file system refresh its cache; looking up a single name may return a cached miss.
    return {_format_marker_name(rank) for rank in ranks} - set(os.listdir(folder))  # noqa: PTH208  # only names are needed


def pop_completion_markers(folder: Path, ranks: Collection[int]) -> list[dict[str, Any]]:
    """Remove the completion markers of `ranks` from `folder`, and return their contents in rank order.

    Raises OSError if a marker cannot be read or removed.
    """
    paths = [folder / _format_marker_name(rank) for rank in sorted(ranks)]
    contents = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return contents


def collect_completion_markers(folder: Path, ranks: Collection[int], all_shards_written: threading.Event) -> FileDigests:
    """Wait for the completion markers of `ranks`, remove them, and return the file digests that they contain.

    Raises CheckpointError if a marker does not appear within 10 s after `all_shards_written` is set, OSError if `folder` does not exist.
    """
    deadline = float("inf")
    while missing := find_missing_markers(folder, ranks):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{min(missing)}, written by another node, is not visible on this node",
                place=f"config trainer.save_dir {folder.parent}",
                hint=fence.NOT_SHARED_HINT,
            )
        if all_shards_written.wait(_POLL_SECONDS):
            deadline = min(deadline, time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS)
            time.sleep(_POLL_SECONDS / 10)
    return {name: digest for marker in pop_completion_markers(folder, ranks) for name, digest in marker.items()}


def _format_marker_name(rank: int) -> str:
    return f"part-{rank:05}.json"
