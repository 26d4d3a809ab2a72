"""Protocol of docker-py's `APIClient` for building and copying images, and the parsing of its output streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any, Protocol

from swarmtrain.errors import ImageError

_IGNORED_PREFIXES = ("--->", "Removing intermediate", "Processing /", "Looking in links", "Installing collected")

ProgressReporter = Callable[[str], None]


class ImageClient(Protocol):
    """The methods of docker-py's low-level client that building and copying images need. They raise OSErrors."""

    def version(self) -> dict[str, Any]: ...

    def inspect_image(self, image: str) -> dict[str, Any]: ...

    def tag(self, image: str, repository: str, tag: str | None = None) -> bool: ...

    def get_image(self, image: str) -> Iterable[bytes]: ...

    def load_image(self, data: Iterable[bytes]) -> Iterable[dict[str, Any]] | None: ...

    def import_image_from_file(self, filename: str, repository: str | None = None, tag: str | None = None) -> Any: ...

    def pull(self, repository: str, *, stream: bool, decode: bool) -> Iterable[dict[str, Any]]: ...

    def push(self, repository: str, *, stream: bool, decode: bool) -> Iterable[dict[str, Any]]: ...

    def create_host_config(self, *, network_mode: str) -> dict[str, Any]: ...

    def create_container(self, image: str, *, entrypoint: list[str], command: list[str], host_config: dict[str, Any]) -> dict[str, Any]: ...

    def put_archive(self, container: str, path: str, data: IO[bytes]) -> bool: ...

    def start(self, container: str) -> None: ...

    def remove_container(self, container: str, *, force: bool, v: bool) -> None: ...

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


def follow_build_output(
    stream: Iterable[dict[str, Any]], *, location: str, report_progress: ProgressReporter, hint: str | None = None
) -> None:
    """Report each line of the engine's build output `stream`, without progress bars. Raises ImageError at the first error in the stream."""
    for message in stream:
        if "error" in message:
            raise ImageError(str(message["error"]).strip(), place=location, hint=hint)
        text = str(message.get("stream", "")).strip()
        if text and not text.startswith(_IGNORED_PREFIXES):
            report_progress(text)


def describe_engine_error(error: OSError) -> str:
    """Return the error message of the engine or of its registry, without the HTTP details."""
    return str(getattr(error, "explanation", None) or error)
