"""Truncate the files that the W&B client writes in offline mode: one file per world. `wandb sync` uploads the files in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_BLOCK_BYTES, _HEADER_BYTES = 1 << 15, 7
"""Size in bytes of a block and of a record header in LevelDB's log format."""


def truncate_offline_files(folder: Path, run_id: str, step: int) -> int | None:
    """Truncate the offline files of `run_id` in `folder` before `step`: later steps are recomputed and logged again.

    Return the last remaining step; -1 if no step remains, None if there are no files. Raises any error that W&B's reader raises.
    """
    last_step = None
    for path in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        end, file_last_step = _find_truncation_point(path, step)
        last_step = max(file_last_step, -1 if last_step is None else last_step)
        staging = path.with_name(f".{path.name}")
        with path.open("rb") as file:
            staging.write_bytes(file.read(end) + bytes(_compute_block_padding(end)))
        # Replace the file by rename: the service process of W&B may outlive its rank, and then writes to an unlinked file.
        staging.replace(path)
    return last_step


def _compute_block_padding(end_offset: int) -> int:
    """Return the number of zero bytes that pad a W&B file after byte `end_offset`.

    If the rest of the block is too small for a record header, it is padded.
    """
    remaining = -end_offset % _BLOCK_BYTES
    return remaining if remaining < _HEADER_BYTES else 0


def _find_truncation_point(path: Path, step: int) -> tuple[int, int]:
    """Return the byte offset at which to truncate the file `path`, and the last step before that offset.

    The file is truncated at the first record of `step` or of a later step, at the first corrupt record, or at its end.
    """
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store: Any = DataStore()  # its methods are not typed
    store.open_for_scan(str(path))
    last_step = -1
    try:
        while True:
            offset: int = store.get_offset()
            try:
                data = store.scan_data()
            except AssertionError:  # W&B's reader raises this for a corrupt record
                return offset, last_step
            record = Record.FromString(data or b"")
            if data is None or (record.HasField("history") and record.history.step.num >= step):
                return offset, last_step
            if record.HasField("history"):
                last_step = record.history.step.num
    finally:
        store.close()
