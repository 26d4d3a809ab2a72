"""Find the newest complete checkpoint: in one shared folder, or in the node-local folders of all nodes.

If each node has its own disk, the checkpoint is copied to all nodes.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import manifest
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage import commit
from swarmtrain.trainer.checkpoint.storage.node_groups import NodeGroups
from swarmtrain.trainer.checkpoint.storage.peer_transfer import exchange_files
from swarmtrain.trainer.runtime import Runtime

WarningReporter = Callable[[str], None]
"""Function that reports a warning to the user, for example that a checkpoint is skipped or cannot be written."""
CheckpointWithManifest = tuple[Path, Manifest]
"""Path and manifest of a checkpoint."""


def find_newest_checkpoint_in_folder(runtime: Runtime, folder: Path, report_warning: WarningReporter) -> CheckpointWithManifest | None:
    """Return path and manifest of the newest complete checkpoint in `folder`, which all ranks can read; None if there is none.

    Collective: all ranks must call it. `report_warning` is called with a message for each checkpoint that is skipped.
    """
    for path, text in collectives.run_on_rank_zero(lambda: _list_candidate_checkpoints(folder, report_warning)):
        content = Manifest.from_text(text, str(path))
        local_names = sorted(content.files)[runtime.rank :: runtime.world_size]
        faults = [fault for _, fault in collectives.all_gather_values(_find_valid_files(path, content, local_names)) if fault]
        if not faults:
            return path, content
        report_warning(f"skipped {path}: {faults[0]}")
    if runtime.is_rank_zero and any(True for _ in commit.scan_checkpoints(folder)):
        report_warning(f"no checkpoint in {folder} is complete: the folder is treated as empty")
    return None


def find_unverified_checkpoint_in_folder(folder: Path) -> CheckpointWithManifest | None:
    """Return path and manifest of the newest checkpoint in `folder`, whose files have the right sizes, but are not verified.

    Collective: all ranks must call it. Return None if there is no checkpoint, or if anything about the folder needs a warning.
    """
    newest = collectives.run_on_rank_zero(lambda: _find_newest_with_right_sizes([*commit.scan_checkpoints(folder)]))
    return (newest[0], Manifest.from_text(newest[1], str(newest[0]))) if newest else None


class _CheckpointIdentity(NamedTuple):
    """Identity of a checkpoint: equal for the copies of the same checkpoint on different nodes."""

    generation: int
    step: int
    digest: str


@dataclass(frozen=True)
class NodeLocalFolders:
    """Finds checkpoints in the folder `save_dir` on the disk of each of `nodes`, for the world with this `generation`.

    All methods are collective: every rank must call them.
    """

    nodes: NodeGroups
    save_dir: Path
    generation: int
    report_warning: WarningReporter

    def find_unverified_checkpoint(self) -> CheckpointWithManifest | None:
        """Return path and manifest of the newest checkpoint, if every node has it with files of the right sizes, which are not verified.

        Return None if a node does not have it, or if anything about a folder needs a warning.
        """
        scanned: list[tuple[Path, Manifest | CheckpointError]] = []
        collectives.run_on_all_ranks(lambda: scanned.extend(commit.scan_checkpoints(self.save_dir)))
        newest = _find_newest_with_right_sizes(scanned)
        content = Manifest.from_text(newest[1], str(newest[0])) if newest else None
        identities = collectives.all_gather_values(tuple(_build_checkpoint_identity(content)) if content else None)
        return (newest[0], content) if newest and content and len(set(identities)) == 1 else None

    def find_newest_checkpoint(self) -> CheckpointWithManifest | None:
        """Find the newest checkpoint whose files are each valid on at least one node, and copy it to all nodes.

        Return its path and manifest; None if there is none.

        Raises CheckpointError if a node cannot write its copy, IncompatibleCheckpoint if a checkpoint has another format version.
        """
        scanned: list[tuple[Path, Manifest | CheckpointError]] = []
        collectives.run_on_all_ranks(lambda: scanned.extend(commit.scan_checkpoints(self.save_dir)))
        local_copies = {_build_checkpoint_identity(content): (path, content) for path, content in scanned if isinstance(content, Manifest)}
        corrupt = [f"{path}: {content.message}" for path, content in scanned if isinstance(content, CheckpointError)]
        copies_by_rank = [
            ([_CheckpointIdentity(*copy) for copy in copies], messages)
            for copies, messages in collectives.all_gather_values(
                ([(copy.generation, copy.step, copy.digest) for copy in local_copies], corrupt) if self.nodes.leader_group else ([], [])
            )
        ]
        for rank, (_, messages) in enumerate(copies_by_rank):
            for message in messages:
                self.report_warning(f"{self._find_node_name(rank)} skipped {message}")
        copy_counts = Counter(copy for copies, _ in copies_by_rank for copy in copies)
        # Of checkpoints with the same generation and step, first try the one that the most nodes have: it needs the fewest copies.
        for copy in sorted(copy_counts, key=lambda copy: (copy.generation, copy.step, copy_counts[copy], copy.digest), reverse=True):
            if checkpoint := self._assemble_checkpoint(copy, local_copies.get(copy)):
                return checkpoint
        if any(copies or messages for copies, messages in copies_by_rank):
            self.report_warning(f"no checkpoint in {self.save_dir} is complete across all nodes: the folder is treated as empty")
        return None

    def _assemble_checkpoint(
        self, identity: _CheckpointIdentity, local_checkpoint: CheckpointWithManifest | None
    ) -> CheckpointWithManifest | None:
        """Copy the checkpoint `identity` to all nodes whose copy is missing or incomplete, and return its path and manifest.

        Return None if a file of the checkpoint is missing or corrupt on all nodes. `local_checkpoint`: this node's copy, if any.
        """
        names, path = (
            tuple(sorted(local_checkpoint[1].files)) if local_checkpoint else (),
            commit.build_checkpoint_path(self.save_dir, identity.step),
        )
        assigned_names = names[self.nodes.local_ranks.index(self.nodes.rank) :: len(self.nodes.local_ranks)]
        file_checks_by_rank = collectives.all_gather_values(
            (names, *(_find_valid_files(*local_checkpoint, assigned_names) if local_checkpoint else ([], None)))
        )
        valid_names: list[set[str]] = [set() for _ in self.nodes.node_names]
        for rank, (_, verified, fault) in enumerate(file_checks_by_rank):
            valid_names[self.nodes.node_of_rank[rank]].update(verified)
            if fault:
                self.report_warning(f"{self._find_node_name(rank)} has a corrupt {path}: {fault}")
        all_names = {name for names, _, _ in file_checks_by_rank for name in names}
        if missing := all_names - set().union(*valid_names):
            self.report_warning(f"skipped {path} of world {identity.generation}: {min(missing)} is missing or corrupt on all nodes")
            return None
        if any(node_names != all_names for node_names in valid_names):
            source_node = next(self.nodes.node_of_rank[rank] for rank, (names, _, _) in enumerate(file_checks_by_rank) if names)
            collectives.run_on_all_ranks(
                lambda: self._copy_checkpoint_to_incomplete_nodes(local_checkpoint, valid_names[self.nodes.node], source_node)
            )
        return path, manifest.read_manifest(path)

    def _copy_checkpoint_to_incomplete_nodes(
        self, local_checkpoint: CheckpointWithManifest | None, valid_file_names: set[str], source_node: int
    ) -> None:
        """Copy a checkpoint to all nodes that lack some of its files. `source_node` is a node that has its manifest.

        `local_checkpoint`: this node's copy, if any; `valid_file_names`: names of the valid files in this copy. Leaders copy; a no-op on
        other ranks.
        """
        if self.nodes.leader_group is None:
            return
        text = collectives.all_gather_values(
            local_checkpoint[1].to_text() if local_checkpoint and self.nodes.node == source_node else "", self.nodes.leader_group
        )[source_node]
        content = Manifest.from_text(text, str(self.save_dir))
        path, is_complete = commit.build_checkpoint_path(self.save_dir, content.step), valid_file_names == set(content.files)
        # A committed checkpoint is never modified: an incomplete copy is rebuilt in a staging folder, from its valid files.
        folder = path if is_complete else commit.build_staging_path(self.save_dir, content.step, self.generation)
        self.nodes.run_on_leaders(
            lambda: None if is_complete else _copy_folder_by_hard_links(path, folder, valid_file_names), self.save_dir
        )
        exchange_files(folder, {name: content.files[name] for name in valid_file_names}, self.nodes, label=path.name)
        self.nodes.run_on_leaders(
            lambda: None if is_complete else commit.commit_checkpoint(self.save_dir, folder, content, self.generation), self.save_dir
        )

    def _find_node_name(self, rank: int) -> str:
        return self.nodes.node_names[self.nodes.node_of_rank[rank]]


def _copy_folder_by_hard_links(source_folder: Path, target_folder: Path, file_names: set[str]) -> None:
    shutil.rmtree(target_folder, ignore_errors=True)
    target_folder.mkdir(parents=True)
    for name in file_names:
        os.link(source_folder / name, target_folder / name)


def _list_candidate_checkpoints(folder: Path, report_warning: WarningReporter) -> list[tuple[Path, str]]:
    for path, content in commit.scan_checkpoints(folder):
        if isinstance(content, CheckpointError):
            report_warning(f"skipped {path}: {content.message}")
    return [(path, content.to_text()) for path, content in commit.list_checkpoints_newest_first(folder)]


def _find_newest_with_right_sizes(scanned: Sequence[tuple[Path, Manifest | CheckpointError]]) -> tuple[Path, str] | None:
    """Return path and manifest text of the newest checkpoint in `scanned`; None if any is corrupt, or a file of it has another size."""
    valid = [(path, content) for path, content in scanned if isinstance(content, Manifest)]
    if not valid or len(valid) < len(scanned):
        return None
    path, content = max(valid, key=lambda pair: (pair[1].generation, pair[1].step))
    return (path, content.to_text()) if manifest.has_right_file_sizes(path, content) else None


def _build_checkpoint_identity(checkpoint_manifest: Manifest) -> _CheckpointIdentity:
    return _CheckpointIdentity(checkpoint_manifest.generation, checkpoint_manifest.step, checkpoint_manifest.fingerprint)


def _find_valid_files(checkpoint_path: Path, checkpoint_manifest: Manifest, file_names: Sequence[str]) -> tuple[list[str], str | None]:
    """Return those of `file_names` that match the manifest in `checkpoint_path`, and the first mismatch as text (None if all match)."""
    valid_names, fault = [], None
    for name in file_names:
        try:
            manifest.verify_files(checkpoint_path, checkpoint_manifest, [name])
            valid_names.append(name)
        except CheckpointError as error:
            fault = fault or error.message
    return valid_names, fault
