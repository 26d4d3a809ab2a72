"""The files that W&B's client leaves when it is offline, one a world, for `wandb sync` to send one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_BLOCK, _HEAD = 1 << 15, 7
"""Bytes of a block and of a record's head, in the format of LevelDB's log."""


def cut_off(folder: Path, run: str, step: int) -> int | None:
    """End the files of `run` in `folder` before `step`: what they have from there on is made and told again.

    Return the last step that is left, -1 if none is; None if there are no files. Raises whatever W&B's own reader does.
    """
    reached = None
    for path in sorted(folder.glob(f"offline-run-*-{run}/run-{run}.wandb")):
        end, last = _whole(path, step)
        reached = max(last, -1 if reached is None else reached)
        aside = path.with_name(f".{path.name}")
        with path.open("rb") as file:
            aside.write_bytes(file.read(end) + bytes(_filling(end)))
        # By rename: the process that W&B keeps beside a rank may outlive it, and go on writing into a file that nobody sees.
        aside.replace(path)
    return reached


def _filling(end: int) -> int:
    """Return the zeros that a file of W&B's has after its byte `end`: a block's rest where no record's head has room."""
    rest = -end % _BLOCK
    return rest if rest < _HEAD else 0


def _whole(path: Path, step: int) -> tuple[int, int]:
    """Return where the file begins to tell of `step`, or of a later one, or to be torn, or ends; and the last step before."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store: Any = DataStore()  # its methods are not typed
    store.open_for_scan(str(path))
    last = -1
    try:
        while True:
            at: int = store.get_offset()
            try:
                data = store.scan_data()
            except AssertionError:  # how that reader says that a record is torn
                return at, last
            record = Record.FromString(data or b"")
            if data is None or (record.HasField("history") and record.history.step.num >= step):
                return at, last
            if record.HasField("history"):
                last = record.history.step.num
    finally:
        store.close()
