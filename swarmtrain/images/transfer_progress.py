"""Progress of layer transfers between an engine and a registry, in bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from swarmtrain.errors import ImageError
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error

_LOG_INTERVAL_SECONDS = 3.0  # seconds between two progress lines of a transfer
_EXISTING_STATUSES = ("Layer already exists", "Already exists", "Mounted from")
_TRANSFER_STATUSES = ("Pushing", "Downloading")


class TransferReporter:
    """Counts the bytes of a transfer, and reports them every 3 s."""

    def __init__(self, report_progress: ProgressReporter) -> None:
        self._report_progress, self._reported_at = report_progress, time.monotonic()
        self.byte_count = 0

    def add_bytes(self, count: int) -> None:
        """Count `count` more bytes."""
        self.byte_count += count
        if time.monotonic() - self._reported_at > _LOG_INTERVAL_SECONDS:
            self._reported_at = time.monotonic()
            self._report_progress(f"{format_bytes(self.byte_count)} so far")


def follow_layer_transfer(
    stream: Iterable[dict[str, Any]], *, location: str, report_progress: ProgressReporter, hint: str | None = None
) -> None:
    """Report the progress of a push or a pull every 3 s, and a summary at the end.

    Raises ImageError on an error in the stream.
    """
    transferred_bytes: dict[str, int] = {}
    existing_layers: set[str] = set()
    reporter = TransferReporter(report_progress)
    for message in stream:
        if "error" in message:
            raise ImageError(str(message["error"]).strip(), place=location, hint=hint)
        layer, status = str(message.get("id", "")), str(message.get("status", ""))
        if status.startswith(_EXISTING_STATUSES):
            existing_layers.add(layer)
        elif status in _TRANSFER_STATUSES:
            before, now = transferred_bytes.get(layer, 0), int((message.get("progressDetail") or {}).get("current") or 0)
            transferred_bytes[layer] = max(before, now)
            reporter.add_bytes(transferred_bytes[layer] - before)
    if transferred_bytes or existing_layers:
        verb = "was" if len(existing_layers) == 1 else "were"
        report_progress(
            f"{_format_layer_count(len(transferred_bytes))}, {format_bytes(reporter.byte_count)}; "
            f"{_format_layer_count(len(existing_layers))} {verb} already present"
        )


def push_image(client: ImageClient, tag: str, *, report_progress: ProgressReporter) -> None:
    """Push `tag` to the registry that it names. Raises ImageError with the registry's message and a hint."""
    hint = "begin the tag with a registry that the engine can reach, such as registry.lab:5000/swarmtrain:0.1"
    report_progress(f"pushing {tag}")
    try:
        follow_layer_transfer(
            client.push(tag, stream=True, decode=True), location=f"image {tag}", report_progress=report_progress, hint=hint
        )
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {tag}", hint=hint) from None


def format_bytes(count: int) -> str:
    """Return `count` bytes as text in kB or MB."""
    return f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def _format_layer_count(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def pull_image_if_missing(client: ImageClient, image: str, report_progress: ProgressReporter, *, hint: str | None = None) -> dict[str, Any]:
    """Return the `docker inspect` data of `image`; pull it first if the engine does not have it. Raises ImageError if the pull fails."""
    try:
        return client.inspect_image(image)
    except OSError:
        report_progress(f"pulling {image}")
    try:
        follow_layer_transfer(client.pull(image, stream=True, decode=True), location=f"image {image}", report_progress=report_progress)
        return client.inspect_image(image)
    except (OSError, ImageError) as error:
        reason = error.message if isinstance(error, ImageError) else describe_engine_error(error)
        raise ImageError(
            f"the engine does not have this image and cannot pull it: {reason}",
            place=f"image {image}",
            hint=hint or f"swarmtrain image build . --tag {image} --push",
        ) from None
