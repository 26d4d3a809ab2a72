"""What building and pushing need of an engine: the part of docker-py's `APIClient` that is used here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any, Protocol

from swarmtrain.errors import ImageError

_NOISE = ("--->", "Removing intermediate", "Processing /", "Looking in links", "Installing collected")

Say = Callable[[str], None]


class Engine(Protocol):
    """The methods of docker-py's low-level client that the images need. They raise OSErrors."""

    def version(self) -> dict[str, Any]: ...

    def inspect_image(self, image: str) -> dict[str, Any]: ...

    def import_image_from_file(self, filename: str, repository: str | None = None, tag: str | None = None) -> Any: ...

    def pull(self, repository: str, *, stream: bool, decode: bool) -> Iterable[dict[str, Any]]: ...

    def push(self, repository: str, *, stream: bool, decode: bool) -> Iterable[dict[str, Any]]: ...

    def build(
        self,
        *,
        fileobj: IO[bytes],
        custom_context: bool,
        tag: str,
        buildargs: dict[str, Any],
        labels: dict[str, str],
        network_mode: str,
        rm: bool,
        forcerm: bool,
        decode: bool,
    ) -> Iterable[dict[str, Any]]: ...


def follow(stream: Iterable[dict[str, Any]], *, place: str, say: Say, hint: str | None = None) -> None:
    """Pass on each line that the engine streams, without progress bars. Raises ImageError at the first error in it."""
    for message in stream:
        if "error" in message:
            raise ImageError(str(message["error"]).strip(), place=place, hint=hint)
        text = str(message.get("stream", "")).strip()
        if text and not text.startswith(_NOISE):
            say(text)


def reason(error: OSError) -> str:
    """Return what the engine or its registry said, without the HTTP around it."""
    return str(getattr(error, "explanation", None) or error)
