"""Sidecar files that rank 0 writes next to checkpoints: metrics.jsonl and wandb-id.

If each node has its own disk, these files are copied to all nodes after a restart, since rank 0 may run on another node than before.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.file_digests import FileDigests, hash_file
from swarmtrain.trainer.checkpoint.storage.node_groups import NodeGroups
from swarmtrain.trainer.checkpoint.storage.peer_transfer import exchange_files

_METRICS_FILE = "metrics.jsonl"
_SIDECAR_NAMES = _METRICS_FILE, "wandb-id"


def sync_sidecar_files(nodes: NodeGroups, save_dir: Path, step: int) -> None:
    """Copy the sidecar files of the node whose metrics.jsonl has the most lines for steps up to `step` to all nodes.

    Nothing is copied if no node has more such lines than the first node. Leaders copy; a no-op on other ranks. Raises CheckpointError on
    every leader if the copy fails on any leader.
    """
    if nodes.leader_group is None:
        return
    step_counts = collectives.all_gather_values(_count_recorded_steps(save_dir / _METRICS_FILE, step), nodes.leader_group)
    source_node = step_counts.index(max(step_counts))
    if source_node == 0:
        return
    is_source, staging_folder = nodes.node == source_node, save_dir / ".sidecar"
    nodes.run_on_leaders(lambda: None if is_source else _recreate_folder(staging_folder), save_dir)
    available = nodes.run_on_leaders(lambda: _hash_sidecar_files(save_dir) if is_source else {}, save_dir)
    names = exchange_files(save_dir if is_source else staging_folder, available, nodes)
    nodes.run_on_leaders(lambda: None if is_source else _move_files(staging_folder, save_dir, list(names)), save_dir)


def _count_recorded_steps(metrics_path: Path, last_step: int) -> int:
    """Return the number of lines of the metrics file for steps up to `last_step`; 0 if there is no file."""
    if not metrics_path.exists():
        return 0
    with metrics_path.open(errors="replace") as file:
        return sum(_parse_step(line) <= last_step for line in file)


def _parse_step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _hash_sidecar_files(folder: Path) -> FileDigests:
    paths = [folder / name for name in _SIDECAR_NAMES if (folder / name).is_file()]
    return {path.name: hash_file(path).build_entry(path.stat().st_size) for path in paths}


def _recreate_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _move_files(staging_folder: Path, save_dir: Path, names: list[str]) -> None:
    for name in names:
        (staging_folder / name).replace(save_dir / name)
    staging_folder.rmdir()
