"""Commit of checkpoints: a checkpoint is written to a staging folder, which is then published by one atomic rename.

The module also lists and removes checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint
from swarmtrain.trainer.checkpoint import manifest
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.retention import CheckpointInfo, RetentionPolicy, select_retained_checkpoints
from swarmtrain.trainer.checkpoint.storage import fence

T = TypeVar("T")
_VISIBILITY_TIMEOUT_SECONDS = 10.0


def run_and_convert_os_errors(save_dir: Path, action: Callable[[], T]) -> T:
    """Run `action`, which accesses `save_dir`, and return its result. An OSError is converted to a CheckpointError."""
    try:
        return action()
    except OSError as error:
        name = f"{Path(error.filename).name}: " if error.filename else ""
        raise CheckpointError(
            f"{name}{describe_os_error(error)}",
            place=f"config trainer.save_dir {save_dir}",
            hint="check that the disk is mounted and not full",
        ) from None


def build_checkpoint_path(save_dir: Path, step: int) -> Path:
    """Return the path of the committed checkpoint of `step` in `save_dir`."""
    return save_dir / f"step-{step:08}"


def build_staging_path(save_dir: Path, step: int, generation: int) -> Path:
    """Return the path of the staging folder in which the world with this `generation` writes the checkpoint of `step`."""
    return save_dir / f".step-{step:08}.world-{generation}"


def create_staging_folder(save_dir: Path, step: int, generation: int) -> Path:
    """Create and return an empty staging folder for the checkpoint of `step`.

    Raises WorldError if a newer world has taken over, CheckpointError if save_dir was replaced by another folder, OSError if the
    folder cannot be created.
    """
    fence.check_fence(save_dir, generation)
    folder = build_staging_path(save_dir, step, generation)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def discard_staging_folder(folder: Path) -> None:
    """Remove the staging folder `folder`; errors are ignored."""
    shutil.rmtree(folder, ignore_errors=True)


def commit_checkpoint(save_dir: Path, staging_folder: Path, checkpoint_manifest: Manifest, generation: int | None = None) -> Path:
    """Write `checkpoint_manifest` to `staging_folder`, and publish the folder as the checkpoint of its step. Return its new path.

    `generation`: generation of the committing world; None: the generation in the manifest. The two differ if an earlier world wrote the
    checkpoint, and this world only copies it. Raises WorldError if a newer world has taken over, CheckpointError if a file is missing,
    OSError if the disk cannot be written.
    """
    _wait_for_manifest_files(staging_folder, checkpoint_manifest)
    with (staging_folder / manifest.MANIFEST_NAME).open("x") as file:
        file.write(checkpoint_manifest.to_text())
        file.flush()
        os.fsync(file.fileno())
    _fsync_folder(staging_folder)
    target = build_checkpoint_path(save_dir, checkpoint_manifest.step)
    fence.check_fence(save_dir, checkpoint_manifest.generation if generation is None else generation)
    if target.exists():
        # The existing checkpoint is from an older world, or corrupt. The new checkpoint supersedes it.
        remove_checkpoint(target)
    staging_folder.rename(target)
    _fsync_folder(save_dir)
    return target


def scan_checkpoints(save_dir: Path) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """Yield each checkpoint folder in `save_dir` with its manifest, or with the error that makes it unusable.

    Raises IncompatibleCheckpoint if a checkpoint has another format version: if that checkpoint were skipped, training would start from
    scratch, and retention would later remove it.
    """
    for folder in sorted(save_dir.glob("step-*")) if save_dir.is_dir() else []:
        try:
            yield folder, manifest.read_manifest(folder)
        except IncompatibleCheckpoint:
            raise
        except CheckpointError as error:
            yield folder, error


def list_checkpoints_newest_first(save_dir: Path) -> list[tuple[Path, Manifest]]:
    """Return path and manifest of the checkpoints with a valid manifest in `save_dir`, sorted by (generation, step), newest first."""
    valid = [(folder, content) for folder, content in scan_checkpoints(save_dir) if isinstance(content, Manifest)]
    return sorted(valid, key=lambda pair: (pair[1].generation, pair[1].step), reverse=True)


def prune_checkpoints(save_dir: Path, policy: RetentionPolicy, generation: int, known_checkpoints: dict[Path, CheckpointInfo]) -> None:
    """Remove the checkpoints that `policy` does not retain, and the staging folders of generations before `generation`.

    `known_checkpoints` is a cache of the metadata of the checkpoints in `save_dir`, and is updated. Without the cache, all manifests would
    be read each time. Raises OSError if a checkpoint cannot be removed.
    """
    checkpoints: dict[Path, CheckpointInfo | None] = {}
    for folder in save_dir.glob("step-*"):
        with contextlib.suppress(IncompatibleCheckpoint):  # written by another version: must not be removed
            checkpoints[folder] = known_checkpoints.get(folder) or _read_checkpoint_info(folder)
    valid = {folder: info for folder, info in checkpoints.items() if info}
    retained = select_retained_checkpoints(valid.values(), policy)
    known_checkpoints.clear()
    known_checkpoints.update({folder: info for folder, info in valid.items() if info in retained})
    for folder, info in checkpoints.items():
        if info not in retained:
            with contextlib.suppress(FileNotFoundError):  # surviving ranks of an earlier world may remove it too
                remove_checkpoint(folder)
    for folder in save_dir.glob(".step-*.world-*"):
        if int(folder.name.rpartition("-")[2]) < generation:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in save_dir.glob(".step-*.removed-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _read_checkpoint_info(folder: Path) -> CheckpointInfo | None:
    """Return the metadata of the checkpoint in `folder` that retention needs; None if its manifest is corrupt.

    Raises IncompatibleCheckpoint if the checkpoint has another format version.
    """
    try:
        content = manifest.read_manifest(folder)
    except IncompatibleCheckpoint:
        raise
    except CheckpointError:
        return None
    return CheckpointInfo(content.generation, content.step, content.validation_loss)


def remove_checkpoint(folder: Path) -> None:
    """Remove the checkpoint `folder`. It is renamed first, so that a partly deleted folder is never mistaken for a checkpoint.

    Raises OSError if the folder cannot be renamed.
    """
    removed_folder = folder.with_name(f".{folder.name}.removed-{time.time_ns()}")
    folder.rename(removed_folder)
    shutil.rmtree(removed_folder, ignore_errors=True)


def _wait_for_manifest_files(folder: Path, checkpoint_manifest: Manifest) -> None:
    """Wait until `folder` contains all files of `checkpoint_manifest`: a network file system may show files of other nodes late.

    Raises CheckpointError if a file does not appear within 10 s.
    """
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS
    for name, expected in checkpoint_manifest.files.items():
        while not (folder / name).is_file() or (folder / name).stat().st_size != expected["size"]:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{name}, written by another node, is not visible on this node",
                    place=f"config trainer.save_dir {folder.parent}",
                    hint=fence.NOT_SHARED_HINT,
                )
            time.sleep(0.1)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
