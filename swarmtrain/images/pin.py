"""Pinning a tag to the digest that its registry has under it now, so that every node runs the same image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from swarmtrain.errors import EngineError, ImageError

# What a registry or the engine says, what that means, and the next step.
_REASONS = (
    (
        ("denied", "unauthorized", "authentication", "credentials"),
        "its registry does not give it away",
        "docker login, or another name for it",
    ),
    (("unknown", "not found"), "its registry does not have it", "swarmtrain image build . --tag {name}:TAG --push"),
    (("invalid reference", "invalid repository"), "it is no image's name", "write it as registry.example.com/name:tag"),
)


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
        raise _not_found(image, error) from None
    platforms = tuple((entry["architecture"], entry["os"]) for entry in found.get("Platforms") or [])
    return Pinned(image if "@" in image else f"{tagged(image)}@{found['Descriptor']['digest']}", platforms)


def _not_found(image: str, error: EngineError) -> ImageError:
    place = f"image {image}"
    if error.status is None:
        return ImageError(f"its registry cannot be asked: {error}", place=place, hint=error.hint)
    for words, what, hint in _REASONS:
        if any(word in error.message.lower() for word in words):
            return ImageError(f"{what}: {error.message}", place=place, hint=hint.format(name=untagged(image)))
    hint = "docker pull there shows the same; a registry without TLS must be in the insecure-registries of every engine"
    return ImageError(f"the engine cannot reach its registry: {error.message}", place=place, hint=hint)


def tagged(image: str) -> str:
    """Return `image` as Docker's own tools write it: without the default registry, and with the default tag."""
    short = image.removeprefix("docker.io/").removeprefix("library/")
    return short if untagged(short) != short else f"{short}:latest"


def untagged(image: str) -> str:
    """Return `image` without its tag and digest; a registry's port is no tag."""
    name = image.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return head if colon and "/" not in tag else name
