"""The fence: one world at a time can commit checkpoints.

Each world that starts takes a token higher than any before it and leaves a file `fence/TOKEN` in save_dir. A world that
was cut off and trains on finds the higher token before its next rename, and stops.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarmtrain.config.files import reason
from swarmtrain.errors import CheckpointError, WorldError


def claim(save_dir: Path, at_least: int) -> int:
    """Take and return the lowest free token above `at_least` and above all taken ones.

    Raises CheckpointError if save_dir cannot be written.
    """
    folder = save_dir / "fence"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = max(at_least, highest(save_dir)) + 1
        while True:
            try:
                os.close(os.open(folder / str(token), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                return token
            except FileExistsError:
                token += 1
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {reason(error)}",
            place=f"config trainer.save_dir {save_dir}",
            hint="the user that trains needs write access to it",
        ) from None


def highest(save_dir: Path) -> int:
    """Return the highest token taken so far, 0 if none."""
    folder = save_dir / "fence"
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def check(save_dir: Path, token: int) -> None:
    """Raises WorldError if a newer world has taken over `save_dir`."""
    newest = highest(save_dir)
    if newest > token:
        raise WorldError(
            f"world {token} is cut off: world {newest} has taken over {save_dir}",
            hint="nothing to do: the newer world goes on; this one saved nothing since",
        )
