"""Copy an image to every node without a registry: save it from one engine and load it into the others, in parallel.

The image is content-addressed: its tag on the nodes contains a prefix of its id. A run whose config has this tag is pinned to the
image id; Swarm does not contact a registry for an id (see pinning.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from swarmtrain.errors import ImageError, SwarmtrainError
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error
from swarmtrain.images.pinning import build_content_tag
from swarmtrain.images.transfer_progress import TransferReporter, format_bytes

_MAX_CONCURRENT_TRANSFERS = 8


ConnectEngine = Callable[[str], ImageClient]
"""Connects to the engine at an address; raises SwarmtrainError if no engine answers there."""


def distribute_image(
    source_engine: ImageClient,
    image: str,
    target_addresses: Mapping[str, str],
    connect_engine: ConnectEngine,
    *,
    report_progress: ProgressReporter,
) -> str:
    """Copy `image` from `source_engine` to the engines at `target_addresses` (name → address). Return the tag of the copies.

    Engines that already have the image are skipped. If the copy to some engines fails, the others still get the image; then ImageError is
    raised, which names every engine that failed.
    """
    try:
        image_info = source_engine.inspect_image(image)
    except OSError as error:
        raise ImageError(
            f"the engine does not have it: {describe_engine_error(error)}",
            place=f"image {image}",
            hint="run docker image ls to list the images of the engine",
        ) from None
    image_id = str(image_info["Id"])
    tag = build_content_tag(image, image_id)
    _tag_image(source_engine, image_id, tag)
    report_progress(f"{image} is {tag}, {format_bytes(int(image_info['Size']))}")

    def describe_failure(engine_name: str, message: str) -> str:
        return (
            f"{engine_name}: {message}"
            if engine_name == target_addresses[engine_name]
            else f"{engine_name} ({target_addresses[engine_name]}): {message}"
        )

    def transfer_to(engine_name: str) -> str:
        try:
            target_engine = connect_engine(target_addresses[engine_name])
            _transfer_image(source_engine, target_engine, image_id, tag, lambda line: report_progress(f"{engine_name}: {line}"))
        except SwarmtrainError as error:
            return describe_failure(engine_name, f"{error.message} ({error.hint})" if error.hint else error.message)
        except OSError as error:
            return describe_failure(engine_name, describe_engine_error(error))
        return ""

    with ThreadPoolExecutor(_MAX_CONCURRENT_TRANSFERS, thread_name_prefix="spread") as pool:
        failure_lines = [line for line in pool.map(transfer_to, target_addresses) if line]
    if failure_lines:
        subject = "one engine does" if len(failure_lines) == 1 else f"{len(failure_lines)} engines do"
        hint = "fix that and run the same command again: those that have the image are skipped"
        raise ImageError(f"{subject} not have it:\n  " + "\n  ".join(failure_lines), place=f"image {tag}", hint=hint)
    return tag


def _transfer_image(
    source_engine: ImageClient, target_engine: ImageClient, image_id: str, tag: str, report_progress: ProgressReporter
) -> None:
    if _try_tag_image(target_engine, image_id, tag):
        report_progress("already has the image")
        return
    reporter, started_at = TransferReporter(report_progress), time.monotonic()

    def stream_image() -> Iterator[bytes]:
        for chunk in source_engine.get_image(tag):
            yield chunk
            reporter.add_bytes(len(chunk))

    for message in target_engine.load_image(stream_image()) or ():
        if "error" in message:
            raise ImageError(str(message["error"]).strip())
    if not _try_tag_image(target_engine, image_id, tag):
        raise ImageError("was loaded, but has a different id there: that engine uses a different image store")
    report_progress(f"{format_bytes(reporter.byte_count)} in {time.monotonic() - started_at:.0f} s")


def _try_tag_image(client: ImageClient, image_id: str, tag: str) -> bool:
    try:
        client.inspect_image(image_id)
    except OSError:
        return False
    _tag_image(client, image_id, tag)
    return True


def _tag_image(client: ImageClient, image_id: str, tag: str) -> None:
    name, _, tag_name = tag.rpartition(":")
    client.tag(image_id, name, tag_name)
