"""Just-in-time checkpoint: if a peer fails, the surviving ranks save the last completed step before they exit.

    a peer dies      collectives fail. All communication of a step takes place before the step's first parameter update, so each rank
                     has the state at the end of a step, and may already have all inputs to complete the next step without communication
    disconnect       surviving ranks close their connections, so that ranks that wait for them fail at once
    report state     each surviving rank reports its state to the coordinator, which decides which step is saved, and which rank writes
                     which shard of the checkpoint
    write            each chosen rank writes its shard and a completion marker; the first chosen rank commits, as for any checkpoint. If
                     each node has its own disk, this is done on every disk to which all shards can be written

No collective is used, since the process groups are broken. A rank that is not chosen waits until the checkpoint is committed, since it may
have to replace a writer that dies. Fencing applies as to any checkpoint: the next world claims save_dir only after this checkpoint is
committed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmtrain import protocol
from swarmtrain.errors import CoordinatorError, SwarmtrainError
from swarmtrain.protocol import Event, RescueAssignment, SurvivorState
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.trainer.checkpoint.storage import commit
from swarmtrain.trainer.checkpoint.storage.completion_markers import find_missing_markers, pop_completion_markers, write_completion_marker
from swarmtrain.trainer.runtime import Runtime

if TYPE_CHECKING:
    from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
    from swarmtrain.trainer.optim import StatefulOptimizer
    from swarmtrain.trainer.parallel import ParallelModel

LOG = logging.getLogger("swarmtrain")
_POLL_SECONDS = 0.05
_REPORT_INTERVALS_SECONDS = 0.2, 1.0
"""Seconds between two reports of a surviving rank to the coordinator: during the first 10 s, and after that."""
_FAST_REPORT_SECONDS = 10.0
_COORDINATOR_TIMEOUT_SECONDS = 25.0
"""Number of seconds without a response from the coordinator after which a surviving rank exits without saving.

If the coordinator's machine has failed too, the coordinator may be restarted within this time. torchrun kills ranks after 30 s.
"""


@contextmanager
def save_checkpoint_on_peer_failure(
    runtime: Runtime,
    model: ParallelModel,
    optimizer: StatefulOptimizer,
    checkpoint_manager: CheckpointManager,
    *,
    get_progress: Callable[[], Progress],
    on_saved: Callable[[int], None],
) -> Iterator[None]:
    """Context manager for training: if the body raises an exception because a peer failed, the surviving ranks save a checkpoint.

    `get_progress` returns the current progress. `on_saved` is called with the saved step, on the rank that has committed the checkpoint.
    If the body raises a SwarmtrainError, no checkpoint is saved: either all ranks raise this error, or the state of the rank that raises
    it cannot be used.
    """
    try:
        yield
    except SwarmtrainError:
        checkpoint_manager.wait_for_pending_save()
        raise
    except Exception:
        try:
            if step := _run_rescue(runtime, model, optimizer, checkpoint_manager, get_progress()):
                on_saved(step)
        except Exception as error:  # noqa: BLE001  # the body's error is raised below, since it is the cause
            LOG.warning("rank %d could not save its shards: %s", runtime.rank, str(error).partition("\n")[0])
        raise


def wait_for_just_in_time_checkpoint(coordinator: CoordinatorClient) -> None:
    """Wait until no surviving ranks of another world are writing a just-in-time checkpoint.

    Returns at once if the coordinator cannot be reached.
    """
    with contextlib.suppress(CoordinatorError):
        start_time = logged_time = time.monotonic()
        while coordinator.is_rescue_pending():
            if logged_time == start_time and time.monotonic() - start_time > 2.0:
                LOG.warning("waiting for the just-in-time checkpoint of the previous world")
                logged_time = time.monotonic()
            time.sleep(_POLL_SECONDS * 4)


def close_peer_connections() -> None:
    """Shut down all TCP connections of this process, so that peers that wait for this rank fail at once, as if it had died."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  # only names are needed
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # raises for a listening socket, which must stay open
                connection.shutdown(socket.SHUT_RDWR)


def _run_rescue(
    runtime: Runtime, model: ParallelModel, optimizer: StatefulOptimizer, checkpoint_manager: CheckpointManager, progress: Progress
) -> int | None:
    """Take part in the just-in-time checkpoint. Return the saved step if this rank has committed the checkpoint, else None."""
    holders = model.mesh.ranks_by_shard
    part = next(number for number, ranks in enumerate(holders) if runtime.rank in ranks)
    is_consistent = not optimizer.is_updating and optimizer.last_step in (0, progress.step)
    storage = checkpoint_manager.storage
    if runtime.coordinator_address is None or storage is None or not is_consistent or len(holders) == runtime.world_size:
        return None  # no coordinator, no save_dir, a partly updated state, or no replica of the failed rank's shard
    disk_of_rank = storage.nodes.node_of_rank if storage.nodes else (0,) * runtime.world_size
    if not _has_disk_with_all_shards(disk_of_rank, holders):
        return None
    close_peer_connections()
    survivor_state = SurvivorState(
        progress.step, optimizer.is_prepared, part, len(holders), runtime.world_size, disk_of_rank[runtime.rank], len(set(disk_of_rank))
    )
    with _RescueClient(
        CoordinatorClient(runtime.coordinator_address), os.environ[protocol.ENV_WORLD], runtime.rank, survivor_state, disk_of_rank
    ) as rescue_client:
        last_attempt, saved_step = 0, None
        while not (rescue := rescue_client.latest_assignment).is_finished:
            if runtime.rank in rescue.writers and rescue.attempt > last_attempt:
                last_attempt = rescue.attempt
                if rescue.step == progress.step + 1 and optimizer.is_prepared:
                    optimizer.step(rescue.step)
                    progress = progress.advance_to_step(rescue.step, progress.consumed_samples + runtime.config.topology.samples_per_step)
                    rescue_client.survivor_state = replace(survivor_state, step=rescue.step, ready=False)
                if rescue.step != progress.step:  # assigned from this rank's earlier state; the coordinator must choose other ranks
                    raise RuntimeError(
                        f"this rank is at step {progress.step}, but the coordinator requests a checkpoint of step {rescue.step}"
                    )
                if _save_shard(runtime, checkpoint_manager, progress, rescue, rescue_client):
                    saved_step = progress.step
            time.sleep(_POLL_SECONDS)
        return saved_step


def _has_disk_with_all_shards(disk_of_rank: Sequence[int], ranks_by_shard: Sequence[Sequence[int]]) -> bool:
    """Return whether there is a disk whose ranks together hold all shards, so that a complete checkpoint can be written to it.

    `disk_of_rank`: index of the disk that each rank saves to; `ranks_by_shard`: for each shard the ranks that hold it.
    """
    return any(all(disk in {disk_of_rank[rank] for rank in ranks} for ranks in ranks_by_shard) for disk in set(disk_of_rank))


def _save_shard(
    runtime: Runtime, checkpoint_manager: CheckpointManager, progress: Progress, rescue: RescueAssignment, rescue_client: _RescueClient
) -> bool:
    """Write this rank's shard of the checkpoint. The first writer of each disk waits for all shards and commits the checkpoint.

    Return True if this rank has committed the checkpoint, or finds it already committed; else False.
    """
    save_dir = checkpoint_manager.save_dir
    if save_dir is None:
        raise ValueError("cannot save a checkpoint without trainer.save_dir")
    start_time, local_writers = time.monotonic(), rescue_client.select_local_writers(rescue)
    is_leader = runtime.rank == local_writers[0]
    try:
        if is_leader and _is_checkpoint_committed(save_dir, progress.step, checkpoint_manager):
            return True
        folder = save_dir / f".step-{progress.step:08}.rescue-{rescue.attempt}.world-{checkpoint_manager.generation}"
        folder.mkdir(exist_ok=True)
        writer, index = checkpoint_manager.stage_local_shard(folder, rescue_client.survivor_state.shard)
        files = writer.write_staged_shards()
        write_completion_marker(folder, runtime.rank, {"files": files, "tensors": index})
        if not is_leader or not (markers := _collect_completion_markers(folder, rescue, rescue_client)):
            return False
        path = checkpoint_manager.commit_checkpoint(save_dir, folder, progress, *_merge_completion_markers(markers))
        checkpoint_manager.latest_step = progress.step
        seconds = round(time.monotonic() - start_time, 3)
        ranks = ", ".join(map(str, local_writers))
        LOG.warning("step %d is saved by the surviving ranks %s: %s, in %.2f s", progress.step, ranks, path, seconds)
        if runtime.rank == rescue.writers[0]:
            event_fields = {"step": progress.step, "path": str(path), "seconds": seconds, "surviving_ranks": list(rescue.writers)}
            rescue_client.coordinator.post_event(Event(protocol.EVENT_CHECKPOINT, event_fields))
        return True
    finally:
        if is_leader:
            rescue_client.coordinator.report_rescue_finished(rescue_client.world, rescue.attempt, runtime.rank)


def _is_checkpoint_committed(save_dir: Path, step: int, checkpoint_manager: CheckpointManager) -> bool:
    """Return whether this world has already committed the checkpoint of `step`, or has resumed from it."""
    newest = next(iter(commit.list_checkpoints_newest_first(save_dir)), None)
    return newest is not None and newest[1].step == step == checkpoint_manager.latest_step


def _collect_completion_markers(folder: Path, rescue: RescueAssignment, rescue_client: _RescueClient) -> list[dict[str, Any]]:
    """Wait for the completion markers of all writers to this disk, remove them, and return their contents.

    Return an empty list if the coordinator has changed or finished the rescue in the meantime, for example because a writer has died.
    """
    ranks = rescue_client.select_local_writers(rescue)
    while find_missing_markers(folder, ranks):
        if rescue_client.latest_assignment.attempt != rescue.attempt or rescue_client.latest_assignment.is_finished:
            return []
        time.sleep(_POLL_SECONDS)
    return pop_completion_markers(folder, ranks)


def _merge_completion_markers(markers: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge the completion markers of all shards. Return their file digests and their tensor index.

    A tensor chunk that several shards contain is taken from the first of them.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for marker in markers:
        files |= marker["files"]
        for name, entry in marker["tensors"].items():
            chunks = tensors.setdefault(name, {**entry, "chunks": []})["chunks"]
            known_offsets = [chunk["offsets"] for chunk in chunks]
            chunks += [chunk for chunk in entry["chunks"] if chunk["offsets"] not in known_offsets]
    return files, tensors


class _RescueClient:
    """Reports this rank's state to the coordinator from a background thread. `latest_assignment` is the coordinator's last response.

    `disk_of_rank`: index of the disk that each rank saves to.
    """

    def __init__(
        self, coordinator: CoordinatorClient, world: str, rank: int, survivor_state: SurvivorState, disk_of_rank: Sequence[int]
    ) -> None:
        self.coordinator, self.world, self.survivor_state, self._rank, self._disk_of_rank = (
            coordinator,
            world,
            survivor_state,
            rank,
            disk_of_rank,
        )
        self.latest_assignment = RescueAssignment()
        self._is_stopped = threading.Event()

    def __enter__(self) -> _RescueClient:
        threading.Thread(target=self._report_state_until_rescue_ends, name="rescue-client", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()

    def select_local_writers(self, rescue: RescueAssignment) -> tuple[int, ...]:
        """Return the ranks among the writers of `rescue` that write to the same disk as this rank."""
        return tuple(rank for rank in rescue.writers if self._disk_of_rank[rank] == self._disk_of_rank[self._rank])

    def _report_state_until_rescue_ends(self) -> None:
        last_answer_time = start_time = time.monotonic()
        while not self._is_stopped.is_set() and not self.latest_assignment.is_finished:
            try:
                self.latest_assignment, last_answer_time = (
                    self.coordinator.report_surviving_rank(self.world, self._rank, self.survivor_state),
                    time.monotonic(),
                )
            except CoordinatorError as error:
                if time.monotonic() - last_answer_time > _COORDINATOR_TIMEOUT_SECONDS:
                    LOG.warning("rank %d exits without saving: %s", self._rank, error)
                    self.latest_assignment = replace(self.latest_assignment, is_finished=True)
            self._is_stopped.wait(
                _REPORT_INTERVALS_SECONDS[0] if time.monotonic() - start_time < _FAST_REPORT_SECONDS else _REPORT_INTERVALS_SECONDS[1]
            )
