"""The build context: the few files of a project that the Dockerfile copies, packed the same way each time."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import IO

from swarmtrain.errors import ImageError

CONTENTS = ("Dockerfile", "requirements/image.txt", "training_code.py", "datautils.py")
_PREPARED = ("build/wheels", "build/package")


def check(context: Path) -> None:
    """Raise ImageError naming all files that an image needs and `context` lacks."""
    missing = [name for name in CONTENTS if not (context / name).is_file()]
    if missing:
        raise ImageError(
            f"has no {', '.join(missing)}", place=str(context), hint="run this where your training_code.py and the Dockerfile are"
        )


def pack(context: Path, into: IO[bytes]) -> None:
    """Write the build context as a tar: the user's files and what was prepared, the same bytes for the same contents."""
    with tarfile.open(fileobj=into, mode="w") as packed:
        for name in CONTENTS:
            packed.add(context / name, name, filter=_anonymous)
        for name in _PREPARED:
            for wheel in sorted((context / name).glob("*.whl")):
                packed.add(wheel, f"{name}/{wheel.name}", filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Take the owner and the time off, and make it readable: none of that may spoil the builder's cache."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime, entry.mode = 0, 0o644
    return entry
