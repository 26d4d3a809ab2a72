"""Storage backends for checkpoints: one folder that all nodes share, or a folder on each node's disk.

                    SharedStorage                       NodeLocalStorage
leader              rank 0                              the lowest rank of each node
shards              each is written once                each is written by every node that holds it, and sent to the other nodes
commit              rank 0 renames the folder           each leader renames its folder, when all nodes have all files
fence               one generation in the folder        the same generation in each folder
newest checkpoint   found in the folder                 complete on one node, or on all nodes together; sent to the other nodes
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from swarmtrain.errors import CheckpointError
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.file_digests import FileDigests
from swarmtrain.trainer.checkpoint.storage import commit, fence, sidecar_files
from swarmtrain.trainer.checkpoint.storage.completion_markers import collect_completion_markers
from swarmtrain.trainer.checkpoint.storage.discovery import (
    CheckpointWithManifest,
    NodeLocalFolders,
    WarningReporter,
    find_newest_checkpoint_in_folder,
    find_unverified_checkpoint_in_folder,
)
from swarmtrain.trainer.checkpoint.storage.node_groups import NodeGroups
from swarmtrain.trainer.checkpoint.storage.peer_transfer import exchange_files
from swarmtrain.trainer.checkpoint.storage.tensor_storage import NodeLocalWriter, StagingBuffer, TensorStorageWriter
from swarmtrain.trainer.runtime import Runtime

_MAX_CLAIM_ATTEMPTS = 3


class StorageBackend(Protocol):
    """Interface of checkpoint storage. All methods except `commit_checkpoint` are collective: every rank must call them."""

    is_leader: bool
    """True if this rank commits the checkpoints on the shared disk, or on its node's disk."""

    @property
    def nodes(self) -> NodeGroups | None:
        """The nodes of this world if each node has its own disk; None for a shared disk."""
        ...

    def claim_generation(self) -> int:
        """Claim a generation for this world, and return it. Worlds with lower generations can then no longer commit.

        Raises CheckpointError if the folder cannot be written, or if trainer.save_dir_shared contradicts the disks; CoordinatorError if
        the coordinator cannot be reached.
        """
        ...

    def create_staging_folder(self, step: int, generation: int) -> Path:
        """Create and return an empty staging folder for the checkpoint of `step`. `generation`: generation of this world.

        Raises WorldError if a newer world has taken over, CheckpointError if the folder cannot be created.
        """
        ...

    def build_storage_writer(self, staging_folder: Path, staging_buffer: StagingBuffer) -> TensorStorageWriter:
        """Return the writer for this rank's shards of the checkpoint in `staging_folder`."""
        ...

    def commit_checkpoint(
        self, staging_folder: Path, all_shards_written: threading.Event, commit_files: Callable[[FileDigests], Path]
    ) -> Path:
        """Wait until `staging_folder` has all shards, call `commit_files` with the digests of all files, and return the checkpoint's path.

        Called by leaders, in a background thread. `all_shards_written` is set when all ranks have written their shards.

        Raises CheckpointError if a file is missing or cannot be written, WorldError if a newer world has taken over.
        """
        ...

    @property
    def reader_groups(self) -> Sequence[Sequence[int]]:
        """Groups of ranks that read the same copy of a checkpoint."""
        ...

    def find_unverified_checkpoint(self, generation: int) -> CheckpointWithManifest | None:
        """Return path and manifest of the newest checkpoint, whose files are not verified, but seem complete everywhere.

        Return None if `find_newest_checkpoint` should be called instead. `generation`: generation of this world.
        """
        ...

    def find_newest_checkpoint(self, generation: int) -> CheckpointWithManifest | None:
        """Return path and manifest of the newest complete checkpoint, after verifying its files; None if there is none.

        `generation`: generation of this world. Raises CheckpointError if a node cannot write its copy.
        """
        ...

    def sync_sidecar_files(self, step: int) -> None:
        """Bring the files next to the checkpoints up to `step` to this rank's disk. A no-op on a shared disk."""
        ...


class SharedStorage:
    """Storage in one folder that all nodes share."""

    def __init__(self, runtime: Runtime, save_dir: Path, report_warning: WarningReporter) -> None:
        self._runtime, self._save_dir, self._report_warning = runtime, save_dir, report_warning
        self.is_leader = runtime.is_rank_zero
        self.nodes = None

    def claim_generation(self) -> int:
        generation = collectives.run_on_rank_zero(lambda: fence.claim_generation(self._save_dir, _find_highest_generation(self._save_dir)))
        fence.wait_for_fence_file(self._save_dir, generation)
        return generation

    def create_staging_folder(self, step: int, generation: int) -> Path:
        return collectives.run_on_rank_zero(
            lambda: commit.run_and_convert_os_errors(self._save_dir, lambda: commit.create_staging_folder(self._save_dir, step, generation))
        )

    def build_storage_writer(self, staging_folder: Path, staging_buffer: StagingBuffer) -> TensorStorageWriter:
        return TensorStorageWriter(staging_folder, self._runtime.rank, staging_buffer)

    def commit_checkpoint(
        self, staging_folder: Path, all_shards_written: threading.Event, commit_files: Callable[[FileDigests], Path]
    ) -> Path:
        return commit.run_and_convert_os_errors(
            self._save_dir,
            lambda: commit_files(collect_completion_markers(staging_folder, range(self._runtime.world_size), all_shards_written)),
        )

    @property
    def reader_groups(self) -> Sequence[Sequence[int]]:
        return [range(self._runtime.world_size)]

    def find_unverified_checkpoint(self, generation: int) -> CheckpointWithManifest | None:
        return find_unverified_checkpoint_in_folder(self._save_dir)

    def find_newest_checkpoint(self, generation: int) -> CheckpointWithManifest | None:
        return find_newest_checkpoint_in_folder(self._runtime, self._save_dir, self._report_warning)

    def sync_sidecar_files(self, step: int) -> None: ...


class NodeLocalStorage:
    """Storage in a folder on each node's disk."""

    def __init__(self, runtime: Runtime, save_dir: Path, report_warning: WarningReporter) -> None:
        self._runtime, self._save_dir, self._report_warning = runtime, save_dir, report_warning
        self.nodes = NodeGroups.from_runtime(runtime)
        self.is_leader = self.nodes.leader_group is not None

    def claim_generation(self) -> int:
        for _ in range(_MAX_CLAIM_ATTEMPTS):
            if generation := self._try_claim_generation():
                return generation
        raise CheckpointError(
            f"is the same folder on several of the nodes {', '.join(self.nodes.node_names)}",
            place=f"config trainer.save_dir {self._save_dir}",
            hint="set trainer.save_dir_shared: true, or give each node its own folder",
        )

    def _try_claim_generation(self) -> int | None:
        """Claim the same generation on the disks of all nodes, and return it; None if it was already claimed on any of the disks."""
        highest = max(collectives.run_on_all_ranks(lambda: _find_highest_generation(self._save_dir) if self.is_leader else 0))
        generation = collectives.run_on_rank_zero(lambda: self._obtain_next_generation(highest))
        return (
            generation
            if all(collectives.run_on_all_ranks(lambda: not self.is_leader or fence.try_claim_generation(self._save_dir, generation)))
            else None
        )

    def create_staging_folder(self, step: int, generation: int) -> Path:
        collectives.run_on_all_ranks(
            lambda: (
                self.is_leader
                and commit.run_and_convert_os_errors(self._save_dir, lambda: commit.create_staging_folder(self._save_dir, step, generation))
            )
        )
        return commit.build_staging_path(self._save_dir, step, generation)

    def build_storage_writer(self, staging_folder: Path, staging_buffer: StagingBuffer) -> TensorStorageWriter:
        return NodeLocalWriter(staging_folder, self.nodes, staging_buffer)

    def commit_checkpoint(
        self, staging_folder: Path, all_shards_written: threading.Event, commit_files: Callable[[FileDigests], Path]
    ) -> Path:
        available = self.nodes.run_on_leaders(
            lambda: collect_completion_markers(staging_folder, self.nodes.local_ranks, all_shards_written), self._save_dir
        )
        files = exchange_files(staging_folder, available, self.nodes)
        return self.nodes.run_on_leaders(lambda: commit_files(files), self._save_dir)

    @property
    def reader_groups(self) -> Sequence[Sequence[int]]:
        nodes = range(len(self.nodes.node_names))
        return [[rank for rank, node in enumerate(self.nodes.node_of_rank) if node == number] for number in nodes]

    def find_unverified_checkpoint(self, generation: int) -> CheckpointWithManifest | None:
        return NodeLocalFolders(self.nodes, self._save_dir, generation, self._report_warning).find_unverified_checkpoint()

    def find_newest_checkpoint(self, generation: int) -> CheckpointWithManifest | None:
        return NodeLocalFolders(self.nodes, self._save_dir, generation, self._report_warning).find_newest_checkpoint()

    def sync_sidecar_files(self, step: int) -> None:
        try:
            collectives.run_on_all_ranks(lambda: sidecar_files.sync_sidecar_files(self.nodes, self._save_dir, step))
        except CheckpointError as error:
            self._report_warning(
                f"metrics.jsonl begins at step {step} on this node; earlier lines cannot be copied from another node: {error}"
            )

    def _obtain_next_generation(self, highest_generation: int) -> int:
        """Return a generation that is higher than `highest_generation` and unused by any other world of this run.

        If there is a coordinator, it assigns the generation, since other worlds may have run on other nodes.
        """
        return (
            CoordinatorClient(self._runtime.coordinator_address).request_generation(highest_generation)
            if self._runtime.coordinator_address
            else highest_generation + 1
        )


def build_storage_backend(runtime: Runtime, save_dir: Path, report_warning: WarningReporter) -> StorageBackend:
    """Return the storage backend that trainer.save_dir_shared selects. Collective: all ranks must call it."""
    return (
        SharedStorage(runtime, save_dir, report_warning)
        if runtime.config.trainer.save_dir_shared
        else NodeLocalStorage(runtime, save_dir, report_warning)
    )


def _find_highest_generation(save_dir: Path) -> int:
    """Return the highest generation of the checkpoints and the fence files in `save_dir`; 0 if there are none."""
    return max(
        fence.find_highest_generation(save_dir), *(content.generation for _, content in commit.list_checkpoints_newest_first(save_dir)), 0
    )
