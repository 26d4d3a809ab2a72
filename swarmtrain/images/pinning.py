"""Pin an image to its content, so that every node runs the same bytes: to the digest that its registry currently has for the tag.

An image that `swarmtrain image distribute` copied to the nodes is not in a registry. Its tag is `spread-` and a prefix of its id, and
it is pinned to the full id (`sha256:…`). Swarm does not contact a registry for an id, and a node without the image rejects the task. So
every node runs the same bytes of a distributed image, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from swarmtrain.errors import EngineError, ImageError

# Words in an error message of the registry or the engine, their meaning, and a hint.
_ERROR_REASONS = (
    (
        ("denied", "unauthorized", "authentication", "credentials"),
        "its registry denies access",
        "run docker login, or use another image name",
    ),
    (("unknown", "not found"), "its registry does not have it", "swarmtrain image build . --tag {name}:TAG --push"),
    (("invalid reference", "invalid repository"), "is not a valid image name", "use the form registry.example.com/name:tag"),
)


_CONTENT_TAG_PREFIX = "spread-"
_IMAGE_ID_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")


class DistributionClient(Protocol):
    """Client that queries an image's registry, and an engine for its local images. Methods raise EngineError on failure."""

    def get(self, api_path: str) -> Any: ...

    def inspect_distribution(self, image: str) -> Any: ...


@dataclass(frozen=True)
class PinnedImage:
    """Pinned image, as all nodes pull it: its reference with the digest, and the platforms for which it is built."""

    reference: str
    platforms: tuple[tuple[str, str], ...]
    """(architecture, operating system) of each platform for which the image is built."""


def pin_image(engine: DistributionClient, image: str) -> PinnedImage:
    """Return `image` pinned to its current digest in the registry, with its platforms.

    If `image` is already pinned, only the platforms are queried. A distributed image is looked up on the engine instead of a registry.

    Raises ImageError if the registry does not have the image, or if the engine cannot reach the registry.
    """
    if is_content_addressed(image):
        return _pin_content_addressed_image(engine, image)
    try:
        distribution = engine.inspect_distribution(image)
    except EngineError as error:
        raise _build_pin_error(image, error) from None
    platforms = tuple((entry["architecture"], entry["os"]) for entry in distribution.get("Platforms") or [])
    return PinnedImage(image if "@" in image else f"{normalize_image_reference(image)}@{distribution['Descriptor']['digest']}", platforms)


def build_content_tag(image: str, image_id: str) -> str:
    """Return the content-addressed tag under which `image`, with the id `image_id`, is distributed to the nodes."""
    return f"{strip_tag(image)}:{_CONTENT_TAG_PREFIX}{image_id.removeprefix('sha256:')[:12]}"


def is_content_addressed(image: str) -> bool:
    """Return whether `image` is named by its content instead of in a registry: by an image id, or by a tag of `build_content_tag`."""
    return bool(_IMAGE_ID_PATTERN.fullmatch(image)) or re.search(rf":{_CONTENT_TAG_PREFIX}[0-9a-f]{{12}}\Z", image) is not None


def _pin_content_addressed_image(engine: DistributionClient, image: str) -> PinnedImage:
    location, hint = f"image {image}", "run swarmtrain image distribute IMAGE on an engine that has it"
    try:
        image_info = engine.get(f"/images/{image}/json")
    except EngineError as error:
        raise ImageError(
            "was distributed to the nodes, but this engine does not have it",
            place=location,
            hint=hint if error.status == 404 else error.hint,
        ) from None
    if image not in (image_info["Id"], build_content_tag(image, image_info["Id"])):
        raise ImageError(f"its tag now refers to another image, {image_info['Id']}", place=location, hint=hint)
    return PinnedImage(image_info["Id"], ((image_info["Architecture"], image_info["Os"]),))


def _build_pin_error(image: str, error: EngineError) -> ImageError:
    location = f"image {image}"
    if error.status is None:
        return ImageError(f"its registry cannot be queried: {error}", place=location, hint=error.hint)
    for words, meaning, hint in _ERROR_REASONS:
        if any(word in error.message.lower() for word in words):
            return ImageError(f"{meaning}: {error.message}", place=location, hint=hint.format(name=strip_tag(image)))
    hint = "docker pull on that engine shows the same error; add a registry without TLS to the insecure-registries of every engine"
    return ImageError(f"the engine cannot reach its registry: {error.message}", place=location, hint=hint)


def normalize_image_reference(image: str) -> str:
    """Return the image reference as Docker's tools write it: without the default registry, and with the default tag if it has none."""
    short_name = image.removeprefix("docker.io/").removeprefix("library/")
    return short_name if strip_tag(short_name) != short_name else f"{short_name}:latest"


def strip_tag(image: str) -> str:
    """Return the image reference without its tag and digest. The port of a registry is kept."""
    name = image.partition("@")[0]
    repository, colon, tag = name.rpartition(":")
    return repository if colon and "/" not in tag else name
