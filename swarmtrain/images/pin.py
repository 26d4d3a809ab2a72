"""Pinning an image to its content, so that every node runs the same: to the digest that its registry has under the tag now.

An image that `swarmtrain image spread` gave to the nodes is in no registry. It is known by its tag, `spread-` and the
beginning of its id, and is pinned to the whole id (`sha256:…`): Swarm asks no registry for an id, and a node that does
not have it refuses the task. So the same bytes run everywhere here too.
"""

from __future__ import annotations

import re
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


_SPREAD = "spread-"
_ID = re.compile(r"sha256:[0-9a-f]{64}")


class Registry(Protocol):
    """What can ask an image's registry about it, and an engine for its own; raises EngineError where that does not work."""

    def get(self, path: str) -> Any: ...

    def distribution(self, image: str) -> Any: ...


@dataclass(frozen=True)
class Pinned:
    """An image as all nodes are to pull it: its reference with the digest, and the platforms it is made for."""

    reference: str
    platforms: tuple[tuple[str, str], ...]
    """(architecture, operating system)"""


def pin(engine: Registry, image: str) -> Pinned:
    """Ask the registry what `image` is now; one that is pinned already is asked for its platforms alone.

    One that was spread is looked up on the engine instead.
    Raises ImageError when the registry does not have it, or the engine cannot reach the registry.
    """
    if is_spread(image):
        return _spread(engine, image)
    try:
        found = engine.distribution(image)
    except EngineError as error:
        raise _not_found(image, error) from None
    platforms = tuple((entry["architecture"], entry["os"]) for entry in found.get("Platforms") or [])
    return Pinned(image if "@" in image else f"{tagged(image)}@{found['Descriptor']['digest']}", platforms)


def by_content(image: str, id: str) -> str:
    """Return the tag under which `image`, with this id, is spread."""
    return f"{untagged(image)}:{_SPREAD}{id.removeprefix('sha256:')[:12]}"


def is_spread(image: str) -> bool:
    """Return whether `image` is named by its content, as no registry has it: a tag of `by_content`, or an id."""
    return bool(_ID.fullmatch(image)) or re.search(rf":{_SPREAD}[0-9a-f]{{12}}\Z", image) is not None


def _spread(engine: Registry, image: str) -> Pinned:
    place, hint = f"image {image}", "swarmtrain image spread IMAGE, from an engine that has it"
    try:
        found = engine.get(f"/images/{image}/json")
    except EngineError as error:
        raise ImageError(
            "it was spread to the nodes, and this engine does not have it", place=place, hint=hint if error.status == 404 else error.hint
        ) from None
    if image not in (found["Id"], by_content(image, found["Id"])):
        raise ImageError(f"the tag was given to another image, {found['Id']}", place=place, hint=hint)
    return Pinned(found["Id"], ((found["Architecture"], found["Os"]),))


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
