"""Push an image to the registry that its tag names."""

from __future__ import annotations

from swarmtrain.errors import ImageError
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error
from swarmtrain.images.transfer import follow_layer_transfer


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
