"""Layers on their way between an engine and a registry, told as bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from swarmtrain.errors import ImageError
from swarmtrain.images.engine import Engine, Say, reason

_PAUSE = 3.0  # seconds between two lines about the same transfer
_THERE = ("Layer already exists", "Already exists", "Mounted from")
_MOVING = ("Pushing", "Downloading")


def follow_layers(stream: Iterable[dict[str, Any]], *, place: str, say: Say, hint: str | None = None) -> None:
    """Say every few seconds how much of a push or a pull is done, and at the end what it came to. Raises ImageError at an error in it."""
    moved: dict[str, int] = {}
    there: set[str] = set()
    said = time.monotonic()
    for message in stream:
        if "error" in message:
            raise ImageError(str(message["error"]).strip(), place=place, hint=hint)
        layer, status = str(message.get("id", "")), str(message.get("status", ""))
        if status.startswith(_THERE):
            there.add(layer)
        elif status in _MOVING:
            moved[layer] = max(moved.get(layer, 0), int((message.get("progressDetail") or {}).get("current") or 0))
        if time.monotonic() - said > _PAUSE:
            said = time.monotonic()
            say(f"{megabytes(sum(moved.values()))} so far")
    if moved or there:
        were = "was" if len(there) == 1 else "were"
        say(f"{_layers(len(moved))}, {megabytes(sum(moved.values()))}; {_layers(len(there))} {were} there already")


def megabytes(count: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def obtain(engine: Engine, image: str, say: Say) -> dict[str, Any]:
    """Return what the engine says of `image`, pulled if it is not there. Raises ImageError."""
    try:
        return engine.inspect_image(image)
    except OSError:
        say(f"pulling {image}")
    try:
        follow_layers(engine.pull(image, stream=True, decode=True), place=f"image {image}", say=say)
        return engine.inspect_image(image)
    except OSError as error:
        hint = f"swarmtrain image build . --tag {image} --push"
        raise ImageError(f"the engine has no such image and cannot pull it: {reason(error)}", place=f"image {image}", hint=hint) from None
