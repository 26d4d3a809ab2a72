"""The fence: one world at a time can commit checkpoints.

Each world that starts takes a token higher than any before it and leaves a file `fence/TOKEN` in save_dir. A world that
was cut off and trains on finds the higher token before its next rename, and stops.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from pathlib import Path

from swarmtrain.config.files import reason
from swarmtrain.errors import CheckpointError, WorldError

LOG = logging.getLogger("swarmtrain")
NOT_SHARED = "mount a disk there that all nodes share; or, where each is to have its own: trainer.save_dir_shared: false"
_POLL = 0.1
_SILENT = 2.0


def claim(save_dir: Path, at_least: int) -> int:
    """Take and return the lowest free token above `at_least` and above all taken ones.

    Raises CheckpointError if save_dir cannot be written.
    """
    token = at_least + 1
    while not take(save_dir, token := max(token, highest(save_dir) + 1)):
        pass
    return token


def take(save_dir: Path, token: int) -> bool:
    """Take `token`, and return whether it was free. Raises CheckpointError if save_dir cannot be written."""
    folder = save_dir / "fence"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / str(token), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError as error:
        if error.filename == str(folder / str(token)):
            return False
        raise _unwritable(save_dir, error) from None
    except OSError as error:
        raise _unwritable(save_dir, error) from None
    return True


def find(save_dir: Path, token: int, patience: float = 60.0) -> None:
    """Look on any rank for the fence that rank 0 has set up, for `patience` seconds: a network's file system may show it later.

    Raises CheckpointError if save_dir is another folder here than there, or cannot be written here.
    """
    begun, told = time.monotonic(), False
    while True:
        try:
            # A listing asks a network's file system anew, where a look for the name may be answered with an old no.
            if str(token) in os.listdir(save_dir / "fence"):  # noqa: PTH208  # names are all that is wanted
                break
        except PermissionError as error:
            raise _unwritable(save_dir, error) from None
        except OSError:
            pass  # not there yet
        waited = time.monotonic() - begun
        if waited > patience:
            raise CheckpointError(
                "is another folder here than on the first rank's node",
                place=f"config trainer.save_dir {save_dir}",
                hint=NOT_SHARED,
            )
        if waited > _SILENT and not told:
            LOG.warning("waiting up to %.0f s for %s to show what the first rank wrote there", patience, save_dir)
            told = True
        time.sleep(_POLL)
    try:
        with tempfile.TemporaryFile(dir=save_dir):
            pass
    except OSError as error:
        raise _unwritable(save_dir, error) from None


def _unwritable(save_dir: Path, error: OSError) -> CheckpointError:
    place, said = f"config trainer.save_dir {save_dir}", f"cannot be written: {reason(error)}"
    there = _existing(Path(error.filename or save_dir)) if error.errno in (errno.EACCES, errno.EPERM) else None
    if there is None:
        return CheckpointError(said, place=place, hint="the user that trains needs write access to it")
    facts = there.stat()
    theirs, ours = f"{facts.st_uid}:{facts.st_gid}", f"{os.geteuid()}:{os.getegid()}"
    hint = f"chown -R {ours} {there}, or what is mounted there"
    if facts.st_uid not in (0, os.geteuid()):
        hint = f"runner.docker_config.user: {theirs}; or {hint}"
    return CheckpointError(f"{said}; {there} belongs to {theirs}, and the ranks are {ours}", place=place, hint=hint)


def _existing(path: Path) -> Path | None:
    """Return what there is of `path`, as far as may be seen."""
    return next((each for each in (path.absolute(), *path.absolute().parents) if os.access(each, os.F_OK)), None)


def highest(save_dir: Path) -> int:
    """Return the highest token taken so far, 0 if none."""
    folder = save_dir / "fence"
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def check(save_dir: Path, token: int) -> None:
    """Raises WorldError if a newer world has taken over `save_dir`, CheckpointError if it is not the folder in which `token` was taken."""
    newest = highest(save_dir)
    if newest > token:
        raise WorldError(
            f"world {token} is cut off: world {newest} has taken over {save_dir}",
            hint="nothing to do: the newer world goes on; this one saved nothing since",
        )
    if newest < token:
        raise CheckpointError(
            f"is not the folder that it was: fence/{token} is gone",
            place=f"config trainer.save_dir {save_dir}",
            hint="is the disk still mounted there?",
        )
