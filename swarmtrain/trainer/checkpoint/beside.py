"""What rank 0 writes beside checkpoints. Where each node has its own disk it goes with the run, to whichever node has rank 0 next."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint.exchange import exchange
from swarmtrain.trainer.checkpoint.nodes import Nodes

_RECORD = "metrics.jsonl"
_NAMES = _RECORD, "wandb-id"


def bring(nodes: Nodes, save_dir: Path, step: int) -> None:
    """Bring the files of the node that has recorded most steps up to `step` to all, unless rank 0's, the first, has as many.

    Keepers do; on other ranks there is nothing to do. Raises CheckpointError, on all keepers alike.
    """
    if nodes.keepers is None:
        return
    recorded = agreement.gather(_recorded(save_dir / _RECORD, step), nodes.keepers)
    giver = recorded.index(max(recorded))
    if giver == 0:
        return
    gives, folder = nodes.node == giver, save_dir / ".beside"
    nodes.together(lambda: None if gives else _empty(folder), save_dir)
    have = nodes.together(lambda: _facts(save_dir) if gives else {}, save_dir)
    names = exchange(save_dir if gives else folder, have, nodes)
    nodes.together(lambda: None if gives else _move(folder, save_dir, list(names)), save_dir)


def _recorded(path: Path, step: int) -> int:
    """Return of how many steps up to `step` there is a line."""
    if not path.exists():
        return 0
    with path.open(errors="replace") as file:
        return sum(_step(line) <= step for line in file)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _facts(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in (folder / name for name in _NAMES if (folder / name).is_file()):
        with path.open("rb") as file:
            found[path.name] = {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return found


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _move(folder: Path, save_dir: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).replace(save_dir / name)
    folder.rmdir()
