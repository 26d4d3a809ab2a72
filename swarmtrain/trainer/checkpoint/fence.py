"""The fence: only one world at a time can commit checkpoints.

Each world that starts takes a generation higher than any before it, and creates the file `fence/GENERATION` in save_dir. A world
that was cut off and continues to train finds the higher generation before its next rename, and stops.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from pathlib import Path

from swarmtrain.config.files import describe_os_error
from swarmtrain.errors import CheckpointError, WorldError

LOG = logging.getLogger("swarmtrain")
NOT_SHARED_HINT = "mount a disk there that all nodes share; or, if each has its own: trainer.save_dir_shared: false"
_POLL_SECONDS = 0.1
_LOG_AFTER_SECONDS = 2.0


def claim_generation(save_dir: Path, above: int) -> int:
    """Take and return the lowest free generation higher than `above` and than all taken ones.

    Raises CheckpointError if save_dir cannot be written.
    """
    generation = above + 1
    while not try_take_generation(save_dir, generation := max(generation, find_highest_generation(save_dir) + 1)):
        pass
    return generation


def try_take_generation(save_dir: Path, generation: int) -> bool:
    """Take `generation`, and return whether it was free. Raises CheckpointError if save_dir cannot be written."""
    folder = save_dir / "fence"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / str(generation), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError as error:
        if error.filename == str(folder / str(generation)):
            return False
        raise _build_unwritable_error(save_dir, error) from None
    except OSError as error:
        raise _build_unwritable_error(save_dir, error) from None
    return True


def wait_for_fence(save_dir: Path, generation: int, timeout_seconds: float = 60.0) -> None:
    """Wait on any rank for the fence file that rank 0 has created, for `timeout_seconds`: a network file system may show it late.

    Raises CheckpointError if save_dir is another folder here than on rank 0, or cannot be written here.
    """
    start_time, is_logged = time.monotonic(), False
    while True:
        try:
            # Listing the folder makes a network file system look again; looking up a name may return a cached miss.
            if str(generation) in os.listdir(save_dir / "fence"):  # noqa: PTH208  # only names are needed
                break
        except PermissionError as error:
            raise _build_unwritable_error(save_dir, error) from None
        except OSError:
            pass  # not there yet
        waited = time.monotonic() - start_time
        if waited > timeout_seconds:
            raise CheckpointError(
                "is another folder here than on the first rank's node",
                place=f"config trainer.save_dir {save_dir}",
                hint=NOT_SHARED_HINT,
            )
        if waited > _LOG_AFTER_SECONDS and not is_logged:
            LOG.warning("waiting up to %.0f s for %s to show what the first rank wrote there", timeout_seconds, save_dir)
            is_logged = True
        time.sleep(_POLL_SECONDS)
    try:
        with tempfile.TemporaryFile(dir=save_dir):
            pass
    except OSError as error:
        raise _build_unwritable_error(save_dir, error) from None


def _build_unwritable_error(save_dir: Path, error: OSError) -> CheckpointError:
    place, message = f"config trainer.save_dir {save_dir}", f"cannot be written: {describe_os_error(error)}"
    existing_path = _find_existing_ancestor(Path(error.filename or save_dir)) if error.errno in (errno.EACCES, errno.EPERM) else None
    if existing_path is None:
        return CheckpointError(message, place=place, hint="the user that trains needs write access to it")
    owner_stat = existing_path.stat()
    owner, user = f"{owner_stat.st_uid}:{owner_stat.st_gid}", f"{os.geteuid()}:{os.getegid()}"
    hint = f"chown -R {user} {existing_path}, or what is mounted there"
    if owner_stat.st_uid not in (0, os.geteuid()):
        hint = f"runner.docker_config.user: {owner}; or {hint}"
    return CheckpointError(f"{message}; {existing_path} belongs to {owner}, and the ranks are {user}", place=place, hint=hint)


def _find_existing_ancestor(path: Path) -> Path | None:
    """Return the deepest existing ancestor of `path`, or `path` itself, as far as permissions show."""
    return next((candidate for candidate in (path.absolute(), *path.absolute().parents) if os.access(candidate, os.F_OK)), None)


def find_highest_generation(save_dir: Path) -> int:
    """Return the highest generation taken so far, 0 if none."""
    folder = save_dir / "fence"
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def check_fence(save_dir: Path, generation: int) -> None:
    """Raise WorldError if a newer world has taken over `save_dir`, CheckpointError if `generation` was not taken in that folder."""
    newest_generation = find_highest_generation(save_dir)
    if newest_generation > generation:
        raise WorldError(
            f"world {generation} is cut off: world {newest_generation} has taken over {save_dir}",
            hint="nothing to do: the newer world continues; this one saved nothing since",
        )
    if newest_generation < generation:
        raise CheckpointError(
            f"is not the folder that it was: fence/{generation} is gone",
            place=f"config trainer.save_dir {save_dir}",
            hint="is the disk still mounted there?",
        )
