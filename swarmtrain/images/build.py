"""Building the image: wheels first, on this machine; then the engine's classic builder, without network."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import IO

from swarmtrain.errors import ImageError
from swarmtrain.images import wheels
from swarmtrain.images.base import ensure_base
from swarmtrain.images.engine import Engine, Say, follow, reason

CONTENTS = ("Dockerfile", "requirements/image.txt", "training_code.py", "datautils.py")
PREPARED = ("build/wheels", "build/package")


def build(engine: Engine, context: Path, tag: str, *, base: str | None = None, say: Say) -> None:
    """Build the image of the project in `context` and tag it.

    `base` is the image to start from; by default Python's own or, where that cannot be pulled, one made from Debian packages.
    Raises ImageError with the failing step's output.
    """
    check_context(context)
    try:
        architecture = str(engine.version()["Arch"])
    except OSError as error:
        raise ImageError(f"no engine to build with: {reason(error)}", place=f"image {tag}", hint="docker info") from None
    base = ensure_base(engine, base, say=say)
    wheels.third_party(context, architecture, say=say)
    wheels.own(context, say=say)
    with tempfile.TemporaryFile(dir=context / "build") as packed:
        pack(context, packed)
        packed.seek(0)
        _build(engine, packed, tag, base, say)


def check_context(context: Path) -> None:
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
        for name in PREPARED:
            for wheel in sorted((context / name).glob("*.whl")):
                packed.add(wheel, f"{name}/{wheel.name}", filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Take the owner and the time off, and make it readable: none of that may spoil the builder's cache."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime, entry.mode = 0, 0o644
    return entry


def _build(engine: Engine, packed: IO[bytes], tag: str, base: str, say: Say) -> None:
    try:
        stream = engine.build(
            fileobj=packed,
            custom_context=True,
            tag=tag,
            buildargs={"BASE_IMAGE": base, "PIP_ARGS": "--no-index --find-links=/wheels"},
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
        )
        follow(stream, place=f"image {tag}", say=say)
    except OSError as error:
        raise ImageError(reason(error), place=f"image {tag}") from None
