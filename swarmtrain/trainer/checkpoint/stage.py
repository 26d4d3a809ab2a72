"""How a checkpoint comes to stand in save_dir: written aside, and moved in whole by one rename. And how it goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from swarmtrain.config.files import reason
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import fence, manifest
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.retention import Keep, Standing, kept

T = TypeVar("T")
_SEEN_WITHIN = 10.0


def told(save_dir: Path, act: Callable[[], T]) -> T:
    """Return what `act` does in `save_dir`. Raises CheckpointError where the disk refuses."""
    try:
        return act()
    except OSError as error:
        name = f"{Path(error.filename).name}: " if error.filename else ""
        raise CheckpointError(
            f"{name}{reason(error)}", place=f"config trainer.save_dir {save_dir}", hint="is the disk full, or gone?"
        ) from None


def path(save_dir: Path, step: int) -> Path:
    """Return where the checkpoint of `step` stands once it is whole."""
    return save_dir / f"step-{step:08}"


def aside(save_dir: Path, step: int, token: int) -> Path:
    """Return where world `token` writes the checkpoint of `step`."""
    return save_dir / f".step-{step:08}.world-{token}"


def begin(save_dir: Path, step: int, token: int) -> Path:
    """Make and return an empty folder to write the checkpoint of `step` into.

    Raises WorldError if a newer world has taken over, CheckpointError if save_dir is not what it was, OSError.
    """
    fence.check(save_dir, token)
    folder = aside(save_dir, step, token)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def give_up(folder: Path) -> None:
    """Remove the half-written `folder`, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def commit(save_dir: Path, folder: Path, content: Manifest, token: int | None = None) -> Path:
    """Turn `folder`, complete but for its manifest, into the checkpoint of its step, and return its new path.

    `token`: of the world that does so, if that is not the one that made it.

    Raises WorldError if a newer world has taken over, CheckpointError if a part is not there, OSError.
    """
    _await_parts(folder, content)
    with (folder / manifest.NAME).open("x") as file:
        file.write(content.to_text())
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    target = path(save_dir, content.step)
    fence.check(save_dir, content.token if token is None else token)
    if target.exists():
        # An older world's, or torn: this world has come past it, so it is worth less than what replaces it.
        remove(target)
    folder.rename(target)
    _sync(save_dir)
    return target


def known(save_dir: Path) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """Yield every checkpoint folder in `save_dir` with its manifest, or with what is wrong with that."""
    for folder in sorted(save_dir.glob("step-*")) if save_dir.is_dir() else []:
        try:
            yield folder, manifest.read(folder)
        except CheckpointError as error:
            yield folder, error


def newest_first(save_dir: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints that have a sound manifest, by (token, step), newest first."""
    sound = [(folder, content) for folder, content in known(save_dir) if isinstance(content, Manifest)]
    return sorted(sound, key=lambda pair: (pair[1].token, pair[1].step), reverse=True)


def prune(save_dir: Path, keep: Keep, token: int, known: dict[Path, Standing]) -> None:
    """Remove the checkpoints that `keep` does not want, and what worlds before `token` left half written or half removed.

    `known`: what stands where, as far as this world has read it; what it has not is added. A run that keeps many would read all each time.
    Raises OSError.
    """
    standing = {folder: known.get(folder) or _standing(folder) for folder in save_dir.glob("step-*")}
    sound = {folder: one for folder, one in standing.items() if one}
    wanted = kept(sound.values(), keep)
    known.clear()
    known.update({folder: one for folder, one in sound.items() if one in wanted})
    for folder, one in standing.items():
        if one not in wanted:
            with contextlib.suppress(FileNotFoundError):  # survivors of a world that broke may be at it too
                remove(folder)
    for folder in save_dir.glob(".step-*.world-*"):
        if int(folder.name.rpartition("-")[2]) < token:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in save_dir.glob(".step-*.removed-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _standing(folder: Path) -> Standing | None:
    """Return what stands in `folder`, None if it is torn."""
    try:
        content = manifest.read(folder)
    except CheckpointError:
        return None
    return Standing(content.token, content.step, content.held_out_loss)


def remove(folder: Path) -> None:
    """Remove the checkpoint `folder`; it is out of sight before its first file goes. Raises OSError."""
    aside = folder.with_name(f".{folder.name}.removed-{time.time_ns()}")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _await_parts(folder: Path, content: Manifest) -> None:
    """A network disk may show another node's file late. Raises CheckpointError if it does not within seconds."""
    deadline = time.monotonic() + _SEEN_WITHIN
    for name, wanted in content.files.items():
        while not (folder / name).is_file() or (folder / name).stat().st_size != wanted["size"]:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{name}, written by another node, is not to be seen here",
                    place=f"config trainer.save_dir {folder.parent}",
                    hint=fence.NOT_SHARED,
                )
            time.sleep(0.1)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
