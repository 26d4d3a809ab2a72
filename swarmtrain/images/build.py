"""Building the image: wheels first, on this machine; then the engine's classic builder, without network."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from swarmtrain.errors import ImageError
from swarmtrain.images import context as contexts
from swarmtrain.images import wheels
from swarmtrain.images.base import ensure_base
from swarmtrain.images.engine import Engine, Say, follow, reason


def build(engine: Engine, context: Path, tag: str, *, base: str | None = None, say: Say) -> None:
    """Build the image of the project in `context` and tag it.

    `base` is the image to start from; by default Python's own or, where that cannot be pulled, one made from Debian packages.
    Raises ImageError with the failing step's output.
    """
    contexts.check(context)
    try:
        architecture = str(engine.version()["Arch"])
    except OSError as error:
        raise ImageError(f"no engine to build with: {reason(error)}", place=f"image {tag}", hint="docker info") from None
    base = ensure_base(engine, base, say=say)
    wheels.third_party(context, architecture, say=say)
    wheels.own(context, say=say)
    with tempfile.TemporaryFile(dir=context / "build") as packed:
        contexts.pack(context, packed)
        packed.seek(0)
        _build(engine, packed, tag, base, say)


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
