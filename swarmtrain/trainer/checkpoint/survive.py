"""What is left when a world breaks: survivors that hold the last completed step whole save it before they leave.

    a peer dies      collectives fail; all that a step needs of others comes before its first write, so what a rank holds
                     is the end of a step, or of one and all that the next one takes
    hang up          survivors that wait for each other learn of it at once
    say who stands where, on the board, which decides which step is saved, and who writes which part of it
    write            each its part, with a note beside it; the first of the writers commits, as a checkpoint like any other.
                     Where each node has its own disk, all do so that hold the whole, and the first of each node's commits

No collective is used: there is no world any more. Whoever is not chosen stays until the checkpoint stands, since he may be
needed when a writer dies too. The fence holds as for every checkpoint, and the next world claims it when this is over.
"""

from __future__ import annotations

import contextlib
import json
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

from swarmtrain import wire
from swarmtrain.board import Board
from swarmtrain.errors import BoardError, SwarmtrainError
from swarmtrain.trainer.checkpoint import stage
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.wire import Event, Rescue, Stand

if TYPE_CHECKING:
    from swarmtrain.trainer.checkpoint import Checkpoints, Progress
    from swarmtrain.trainer.optim import Optimizer
    from swarmtrain.trainer.parallel import ParallelModel

LOG = logging.getLogger("swarmtrain")
_POLL = 0.05
_SAY = 0.2, 1.0
"""Seconds between two words to the board: at first, and later."""
_AT_FIRST = 10.0
_UNHEARD = 25.0
"""Seconds without the board's answer after which a survivor leaves. A board whose machine died with it may be back by then, and
torch gives ranks 30 s."""


@contextmanager
def outlived(
    here: Runtime,
    model: ParallelModel,
    optimizer: Optimizer,
    checkpoints: Checkpoints,
    *,
    come: Callable[[], Progress],
    saved: Callable[[int], None],
) -> Iterator[None]:
    """Train in the body; what raises there breaks the world, and its survivors save what they hold.

    `come`: how far training is now. `saved` is called with a step on the rank that has saved it for all.

    Errors of ours are raised as they are: all ranks meet them, or the one that does has nothing that is worth saving.
    """
    try:
        yield
    except SwarmtrainError:
        checkpoints.let_land()
        raise
    except Exception:
        try:
            if step := _rescue(here, model, optimizer, checkpoints, come()):
                saved(step)
        except Exception as error:  # noqa: BLE001  # what broke the world is to be told, not what came of it
            LOG.warning("rank %d could not save what it holds: %s", here.rank, str(error).partition("\n")[0])
        raise


def await_rescue(board: Board) -> None:
    """Return when no survivors of another world are saving any more. A board that does not answer knows of none."""
    with contextlib.suppress(BoardError):
        begun = told = time.monotonic()
        while board.rescuing():
            if told == begun and time.monotonic() - begun > 2.0:
                LOG.warning("waiting for what survivors of the last world are saving")
                told = time.monotonic()
            time.sleep(_POLL * 4)


def hang_up() -> None:
    """End this process's TCP connections. Peers that wait for this rank fail at once, as if it had died."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  # names are all that is wanted
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # who listens has none, and must not be disturbed
                connection.shutdown(socket.SHUT_RDWR)


def _rescue(here: Runtime, model: ParallelModel, optimizer: Optimizer, checkpoints: Checkpoints, progress: Progress) -> int | None:
    """Return the step that this rank has saved for all, if it was the one to do so."""
    holders = model.mesh.holders
    part = next(number for number, ranks in enumerate(holders) if here.rank in ranks)
    held = not optimizer.writing and optimizer.made in (0, progress.step)
    disk = checkpoints.disk
    if here.board is None or disk is None or not held or len(holders) == here.size:
        return None  # without a board, or with no other rank that holds the same, there is nothing to agree on
    of = disk.nodes.of if disk.nodes else (0,) * here.size
    if not _one_has_all(of, holders):
        return None
    hang_up()
    stand = Stand(progress.step, optimizer.prepared, part, len(holders), here.size, of[here.rank], len(set(of)))
    with _Council(Board(here.board), wire.world_key(os.environ), here.rank, stand, of) as council:
        tried, done = 0, None
        while not (rescue := council.latest).over:
            if here.rank in rescue.writers and rescue.attempt > tried:
                tried = rescue.attempt
                if rescue.step == progress.step + 1 and optimizer.prepared:
                    optimizer.step(rescue.step)
                    progress = progress.after(rescue.step, progress.consumed_samples + here.config.topology.global_batch)
                    council.stand = replace(stand, step=rescue.step, ready=False)
                if rescue.step != progress.step:  # chosen for where it stood before: others must be
                    raise RuntimeError(f"it stands at step {progress.step}, and step {rescue.step} is to be saved")
                if _save(here, checkpoints, progress, rescue, council):
                    done = progress.step
            time.sleep(_POLL)
        return done


def _one_has_all(disks: Sequence[int], holders: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of one disk hold all parts. `disks`: to which each rank saves; `holders`: the ranks of each part."""
    return any(all(disk in {disks[rank] for rank in ranks} for ranks in holders) for disk in set(disks))


def _save(here: Runtime, checkpoints: Checkpoints, progress: Progress, rescue: Rescue, council: _Council) -> bool:
    """Write this rank's part; as the first of the writers to this disk commit them all. Return whether this rank has done that."""
    save_dir = checkpoints.save_dir
    if save_dir is None:
        raise ValueError("a checkpoint without trainer.save_dir")
    begun, team = time.monotonic(), council.team(rescue)
    leads = here.rank == team[0]
    try:
        if leads and _stands(save_dir, progress.step, checkpoints):
            return True
        folder = save_dir / f".step-{progress.step:08}.rescue-{rescue.attempt}.world-{checkpoints.token}"
        folder.mkdir(exist_ok=True)
        writer, index = checkpoints.take(folder, council.stand.part)
        files = writer.write()
        _leave_note(folder, here.rank, {"files": files, "tensors": index})
        if not leads or not (notes := _notes(folder, rescue, council)):
            return False
        path = checkpoints.commit(save_dir, folder, progress, *_together(notes))
        checkpoints.saved = progress.step
        seconds = round(time.monotonic() - begun, 3)
        ranks = ", ".join(map(str, team))
        LOG.warning("step %d is saved by what has survived, rank %s: %s, in %.2f s", progress.step, ranks, path, seconds)
        if here.rank == rescue.writers[0]:
            facts = {"step": progress.step, "path": str(path), "seconds": seconds, "survivors": list(rescue.writers)}
            council.board.post(Event(wire.CHECKPOINT, facts))
        return True
    finally:
        if leads:
            council.board.rescued(council.world, rescue.attempt, here.rank)


def _stands(save_dir: Path, step: int, checkpoints: Checkpoints) -> bool:
    """Return whether the checkpoint of `step` stands already, this world's own or the one that it began with."""
    newest = next(iter(stage.newest_first(save_dir)), None)
    return newest is not None and newest[1].step == step == checkpoints.saved


def _leave_note(folder: Path, rank: int, note: dict[str, Any]) -> None:
    aside = folder / f".note-{rank:05}"
    aside.write_text(json.dumps(note))
    aside.rename(folder / f"note-{rank:05}.json")


def _notes(folder: Path, rescue: Rescue, council: _Council) -> list[dict[str, Any]]:
    """Wait for the notes of all writers to this disk, and take them away; none if one of these has died."""
    wanted = {f"note-{rank:05}.json" for rank in council.team(rescue)}
    while not wanted <= set(os.listdir(folder)):  # noqa: PTH208  # a listing asks a network's file system anew
        if council.latest.attempt != rescue.attempt or council.latest.over:
            return []
        time.sleep(_POLL)
    notes = [json.loads((folder / name).read_text()) for name in sorted(wanted)]
    for name in wanted:
        (folder / name).unlink()
    return notes


def _together(notes: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return files and tensors of all parts. What several hold alike is taken from the first."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for note in notes:
        files |= note["files"]
        for name, entry in note["tensors"].items():
            chunks = tensors.setdefault(name, {**entry, "chunks": []})["chunks"]
            known = [chunk["offsets"] for chunk in chunks]
            chunks += [chunk for chunk in entry["chunks"] if chunk["offsets"] not in known]
    return files, tensors


class _Council:
    """Says on the board, from a thread, that this rank lives and where it stands; `latest` is what the board last said.

    `disks`: to which each rank saves.
    """

    def __init__(self, board: Board, world: str, rank: int, stand: Stand, disks: Sequence[int]) -> None:
        self.board, self.world, self.stand, self._rank, self._disks = board, world, stand, rank, disks
        self.latest = Rescue()
        self._left = threading.Event()

    def __enter__(self) -> _Council:
        threading.Thread(target=self._run, name="council", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def team(self, rescue: Rescue) -> tuple[int, ...]:
        """Return which of the writers write to this rank's disk."""
        return tuple(rank for rank in rescue.writers if self._disks[rank] == self._disks[self._rank])

    def _run(self) -> None:
        heard = begun = time.monotonic()
        while not self._left.is_set() and not self.latest.over:
            try:
                self.latest, heard = self.board.stand(self.world, self._rank, self.stand), time.monotonic()
            except BoardError as error:
                if time.monotonic() - heard > _UNHEARD:
                    LOG.warning("rank %d leaves without saving: %s", self._rank, error)
                    self.latest = replace(self.latest, over=True)
            self._left.wait(_SAY[0] if time.monotonic() - begun < _AT_FIRST else _SAY[1])
