"""Building images, by the engine's classic builder and without network: what they need lies ready on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from swarmtrain.errors import ImageError
from swarmtrain.images import contents, lock, wheels
from swarmtrain.images import context as contexts
from swarmtrain.images import project as projects
from swarmtrain.images.base import ensure_base
from swarmtrain.images.engine import Engine, Say, follow, reason


def build(engine: Engine, context: Path, tag: str, *, base: str | None = None, say: Say) -> None:
    """Build the image of the project in the folder `context` and tag it.

    `base` is the image to start from; by default Python's own or, where that cannot be pulled, one made from Debian packages.
    Raises ImageError with the failing step's output.
    """
    project = projects.project(context)
    if project.lock:
        lock.check(project.pins, project.lock)
    try:
        architecture = str(engine.version()["Arch"])
    except OSError as error:
        raise ImageError(f"no engine to build with: {reason(error)}", place=f"image {tag}", hint="docker info") from None
    base = ensure_base(engine, base, say=say)
    wheels.third_party(project, architecture, say=say)
    wheels.further(project, architecture, say=say)
    wheels.own(project.package, say=say)
    arguments = {"BASE_IMAGE": base, "PIP_ARGS": "--no-index --find-links=/wheels", "HASHES": "--require-hashes" if project.lock else ""}
    with tempfile.TemporaryFile(dir=context / "build") as packed:
        contexts.pack(project, packed)
        run(engine, packed, tag, arguments=arguments, labels=contents.of(project).labels(), say=say)


def run(
    engine: Engine, packed: IO[bytes], tag: str, *, labels: Mapping[str, str], arguments: Mapping[str, str] | None = None, say: Say
) -> None:
    """Have the engine build the context `packed` and tag what comes out. Raises ImageError."""
    packed.seek(0)
    try:
        stream = engine.build(
            fileobj=packed,
            custom_context=True,
            tag=tag,
            buildargs=dict(arguments or {}),
            labels=dict(labels),
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
        )
        follow(stream, place=f"image {tag}", say=say)
    except OSError as error:
        raise ImageError(reason(error), place=f"image {tag}") from None
