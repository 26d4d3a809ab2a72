"""Build images with the engine's classic builder and without network: all inputs are already on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from swarmtrain.errors import ImageError
from swarmtrain.images import build_context as contexts
from swarmtrain.images import contents, lock, wheels
from swarmtrain.images import project as projects
from swarmtrain.images.base_image import ensure_base_image
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error, follow_build_output


def build_image(client: ImageClient, context: Path, tag: str, *, base: str | None = None, report_progress: ProgressReporter) -> None:
    """Build the image of the project in the folder `context`, and tag it `tag`.

    `base` is the base image; by default it is Python's official image or, if that cannot be pulled, one built from Debian packages.
    Raises ImageError with the output of the failing step.
    """
    project = projects.find_project(context)
    if project.lock:
        lock.check_lock(project.pins, project.lock)
    try:
        architecture = str(client.version()["Arch"])
    except OSError as error:
        raise ImageError(
            f"no Docker engine available to build with: {describe_engine_error(error)}", place=f"image {tag}", hint="docker info"
        ) from None
    base = ensure_base_image(client, base, report_progress=report_progress)
    wheels.download_pinned_wheels(project, architecture, report_progress=report_progress)
    wheels.download_extra_wheels(project, architecture, report_progress=report_progress)
    wheels.build_swarmtrain_wheel(project.package_wheel, report_progress=report_progress)
    build_args = {"BASE_IMAGE": base, "PIP_ARGS": "--no-index --find-links=/wheels", "HASHES": "--require-hashes" if project.lock else ""}
    with tempfile.TemporaryFile(dir=context / "build") as tar_file:
        contexts.write_build_context(project, tar_file)
        run_build(
            client,
            tar_file,
            tag,
            build_args=build_args,
            labels=contents.compute_contents(project).to_labels(),
            report_progress=report_progress,
        )


def run_build(
    client: ImageClient,
    tar_file: IO[bytes],
    tag: str,
    *,
    labels: Mapping[str, str],
    build_args: Mapping[str, str] | None = None,
    report_progress: ProgressReporter,
) -> None:
    """Build an image from the build context `tar_file` on the engine, and tag it `tag`.

    Raises ImageError with the output of the failing step.
    """
    tar_file.seek(0)
    try:
        stream = client.build(
            fileobj=tar_file,
            custom_context=True,
            tag=tag,
            buildargs=dict(build_args or {}),
            labels=dict(labels),
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
        )
        follow_build_output(stream, location=f"image {tag}", report_progress=report_progress)
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {tag}") from None
