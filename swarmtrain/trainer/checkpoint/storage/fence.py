"""Fencing of checkpoints: only the newest world can commit them. A world is a set of ranks that train together.

When a world starts, it claims a generation (a fencing token) that is higher than all earlier generations, and creates the file
`fence/GENERATION` in save_dir. If an older world still trains, for example after a network partition, it finds the higher generation
before its next commit, and stops.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from pathlib import Path

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import CheckpointError, WorldError

LOG = logging.getLogger("swarmtrain")
NOT_SHARED_HINT = "mount a file system there that all nodes share; or, if each node has its own disk, set trainer.save_dir_shared: false"
_POLL_SECONDS = 0.1
_LOG_AFTER_SECONDS = 2.0


def claim_generation(save_dir: Path, exclusive_lower_bound: int) -> int:
    """Claim and return the lowest generation that is higher than `exclusive_lower_bound` and than all generations claimed so far.

    Raises CheckpointError if save_dir cannot be written.
    """
    generation = exclusive_lower_bound + 1
    while not try_claim_generation(save_dir, generation := max(generation, find_highest_generation(save_dir) + 1)):
        pass
    return generation


def try_claim_generation(save_dir: Path, generation: int) -> bool:
    """Claim `generation` by creating its fence file. Return True if the claim succeeded, False if `generation` was already claimed.

    Raises CheckpointError if save_dir cannot be written.
    """
    folder = save_dir / "fence"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / str(generation), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError as error:
        if error.filename == str(folder / str(generation)):
            return False
        raise _build_unwritable_save_dir_error(save_dir, error) from None
    except OSError as error:
        raise _build_unwritable_save_dir_error(save_dir, error) from None
    return True


def wait_for_fence_file(save_dir: Path, generation: int, timeout: float = 60.0) -> None:
    """Wait until this node sees the fence file that rank 0 has created: a network file system may show it late.

    Raises CheckpointError if save_dir cannot be written on this node, or if the file does not appear within `timeout` seconds:
    save_dir is then not the same folder as on rank 0.
    """
    start_time, is_logged = time.monotonic(), False
    while True:
        try:
            # Listing the folder makes a network file system refresh its cache; looking up a single name may return a cached miss.
            if str(generation) in os.listdir(save_dir / "fence"):  # noqa: PTH208  # only names are needed
                break
        except PermissionError as error:
            raise _build_unwritable_save_dir_error(save_dir, error) from None
        except OSError:
            pass  # the folder is not visible yet
        waited = time.monotonic() - start_time
        if waited > timeout:
            raise CheckpointError(
                "is not the same folder as on rank 0's node",
                place=f"config trainer.save_dir {save_dir}",
                hint=NOT_SHARED_HINT,
            )
        if waited > _LOG_AFTER_SECONDS and not is_logged:
            LOG.warning("waiting up to %.0f s for %s to show the file that rank 0 wrote there", timeout, save_dir)
            is_logged = True
        time.sleep(_POLL_SECONDS)
    try:
        with tempfile.TemporaryFile(dir=save_dir):
            pass
    except OSError as error:
        raise _build_unwritable_save_dir_error(save_dir, error) from None


def _build_unwritable_save_dir_error(save_dir: Path, error: OSError) -> CheckpointError:
    place, message = f"config trainer.save_dir {save_dir}", f"cannot be written: {describe_os_error(error)}"
    existing_path = _find_existing_ancestor(Path(error.filename or save_dir)) if error.errno in (errno.EACCES, errno.EPERM) else None
    if existing_path is None:
        return CheckpointError(message, place=place, hint="give the training user write access to it")
    owner_stat = existing_path.stat()
    owner, user = f"{owner_stat.st_uid}:{owner_stat.st_gid}", f"{os.geteuid()}:{os.getegid()}"
    hint = f"run chown -R {user} on {existing_path}, or on the host folder that is mounted there"
    if owner_stat.st_uid not in (0, os.geteuid()):
        hint = f"set runner.docker_config.user: {owner}; or {hint}"
    return CheckpointError(f"{message}; {existing_path} belongs to {owner}, and the ranks run as {user}", place=place, hint=hint)


def _find_existing_ancestor(path: Path) -> Path | None:
    """Return `path` if it exists, else its nearest existing ancestor; None if permissions hide all of them."""
    return next((candidate for candidate in (path.absolute(), *path.absolute().parents) if os.access(candidate, os.F_OK)), None)


def find_highest_generation(save_dir: Path) -> int:
    """Return the highest generation claimed in `save_dir`; 0 if there is none."""
    folder = save_dir / "fence"
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def check_fence(save_dir: Path, generation: int) -> None:
    """Raise WorldError if a newer world has taken over `save_dir`.

    Raise CheckpointError if the fence file of `generation` is missing.
    """
    newest_generation = find_highest_generation(save_dir)
    if newest_generation > generation:
        raise WorldError(
            f"world {generation} can no longer save: the newer world {newest_generation} has taken over {save_dir}",
            hint="no action needed: the newer world continues; this one has saved nothing since",
        )
    if newest_generation < generation:
        raise CheckpointError(
            f"is no longer the same folder: fence/{generation} is missing",
            place=f"config trainer.save_dir {save_dir}",
            hint="check that the disk is still mounted there",
        )
