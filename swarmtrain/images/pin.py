"""Pinning a tag to the digest that its registry has under it now, so that every node runs the same image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from swarmtrain.errors import EngineError, ImageError


class Registry(Protocol):
    """What can ask an image's registry about it, and raises EngineError where that does not work."""

    def distribution(self, image: str) -> Any: ...


@dataclass(frozen=True)
class Pinned:
    """An image as all nodes are to pull it: its reference with the digest, and the platforms it is made for."""

    reference: str
    platforms: tuple[tuple[str, str], ...]
    """(architecture, operating system)"""


def pin(engine: Registry, image: str) -> Pinned:
    """Ask the registry what `image` is now; one that is pinned already is asked for its platforms alone.

    Raises ImageError when the registry does not have it, or the engine cannot reach the registry.
    """
    try:
        found = engine.distribution(image)
    except EngineError as error:
        hint = f"swarmtrain image build . --tag {untagged(image)}:TAG --push"
        raise ImageError(
            f"its registry does not have it, or cannot be reached: {error.message}", place=f"image {image}", hint=hint
        ) from None
    platforms = tuple((entry["architecture"], entry["os"]) for entry in found.get("Platforms") or [])
    return Pinned(image if "@" in image else f"{tagged(image)}@{found['Descriptor']['digest']}", platforms)


def tagged(image: str) -> str:
    """Return `image` as Docker's own tools write it: without the default registry, and with the default tag."""
    short = image.removeprefix("docker.io/").removeprefix("library/")
    return short if untagged(short) != short else f"{short}:latest"


def untagged(image: str) -> str:
    """Return `image` without its tag and digest; a registry's port is no tag."""
    name = image.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return head if colon and "/" not in tag else name
