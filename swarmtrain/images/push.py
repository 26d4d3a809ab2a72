"""Pushing an image to the registry that its tag names."""

from __future__ import annotations

from swarmtrain.errors import ImageError
from swarmtrain.images.engine import Engine, Say, reason
from swarmtrain.images.transfer import follow_layers


def push(engine: Engine, tag: str, *, say: Say) -> None:
    """Push `tag` to the registry that it names. Raises ImageError with the registry's words and a hint."""
    hint = "the tag must begin with a registry that the engine can reach, such as registry.lab:5000/swarmtrain:0.1"
    say(f"pushing {tag}")
    try:
        follow_layers(engine.push(tag, stream=True, decode=True), place=f"image {tag}", say=say, hint=hint)
    except OSError as error:
        raise ImageError(reason(error), place=f"image {tag}", hint=hint) from None
