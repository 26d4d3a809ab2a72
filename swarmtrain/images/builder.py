"""Build images with the engine's classic builder (not BuildKit), without a network that reaches others: all inputs are on this machine."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from swarmtrain.cargo.docker_ignore import FolderEntry
from swarmtrain.errors import ImageError
from swarmtrain.images import contents, lock_file, wheels
from swarmtrain.images import folder_archive as folders
from swarmtrain.images import project as projects
from swarmtrain.images.base_image import ensure_base_image
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error, follow_build_output
from swarmtrain.images.project import DOCKERFILE, LOCK, PINS, REQUIREMENTS, Project
from swarmtrain.images.wheel_server import PIP_ARGS, serve_wheels


def build_image(client: ImageClient, context: Path, tag: str, *, base_image: str | None = None, report_progress: ProgressReporter) -> None:
    """Build the image of the project in the folder `context`, and tag it `tag`.

    `base_image`: by default Python's official image or, if that cannot be pulled, one built from Debian packages. If torch supports GPUs,
    the default has a C++ compiler.
    Raises ImageError with the output of the failing step.
    """
    project = projects.find_project(context)
    if project.lock:
        lock_file.check_lock_file(project.pins, project.lock)
    try:
        architecture = str(client.version()["Arch"])
    except OSError as error:
        raise ImageError(
            f"no Docker engine available to build with: {describe_engine_error(error)}",
            place=f"image {tag}",
            hint="run docker info to see why the engine is not reachable",
        ) from None
    if base_image is not None:
        ensure_base_image(client, base_image, report_progress=report_progress)  # before the long downloads
    with ThreadPoolExecutor(2) as pool:
        package = pool.submit(wheels.build_swarmtrain_wheel, project.package_wheel_folder, report_progress=report_progress)
        base = pool.submit(ensure_base_image, client, base_image, report_progress=report_progress)
        wheels.download_pinned_wheels(project, architecture, report_progress=report_progress)
        wheels.download_extra_wheels(project, architecture, report_progress=report_progress)
        package.result()
    # Only the downloads show whether a compiler is needed. Compared to those, the other image is small, and need not be available.
    needs_compiler = wheels.can_compile_for_gpus(project.wheel_folder)
    base_name = (
        ensure_base_image(client, base_image, needs_compiler=True, report_progress=report_progress) if needs_compiler else base.result()
    )
    build_args = {
        "BASE_IMAGE": base_name,
        "PIP_ARGS": "--no-index --find-links=/wheels" if project.copies_wheels else PIP_ARGS,
        "HASHES": "--require-hashes" if project.lock else "",
        "PACKAGES": _compute_names_digest(project.list_wheels()),
        "EXTRA_PACKAGES": _compute_names_digest(project.list_extra_wheels()),
    }
    try:
        with ExitStack() as stack:
            tar_file = stack.enter_context(tempfile.TemporaryFile(dir=context / "build"))
            write_build_context(project, tar_file)
            network_mode = "none" if project.copies_wheels else stack.enter_context(serve_wheels(client, base_name, project))
            build_image_from_tar(
                client,
                tar_file,
                tag,
                build_args=build_args,
                labels=contents.compute_image_contents(project).to_labels(),
                network_mode=network_mode,
                report_progress=report_progress,
            )
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {tag}") from None


def build_image_from_tar(
    client: ImageClient,
    tar_file: IO[bytes],
    tag: str,
    *,
    labels: Mapping[str, str],
    build_args: Mapping[str, str] | None = None,
    network_mode: str = "none",
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
            network_mode=network_mode,
            rm=True,
            forcerm=True,
            decode=True,
        )
        follow_build_output(stream, location=f"image {tag}", report_progress=report_progress)
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {tag}") from None


def _compute_names_digest(wheels: Sequence[Path]) -> str:
    return hashlib.sha256(" ".join(path.name for path in wheels).encode()).hexdigest()[:12] if wheels else ""


def write_build_context(project: Project, tar_file: IO[bytes]) -> None:
    """Write the build context as a tar archive: the user's files and the prepared wheels. Equal contents give a byte-identical archive."""
    with tarfile.open(fileobj=tar_file, mode="w") as archive:
        folders.add_entries_to_archive(archive, _list_context_entries(project))


def _list_context_entries(project: Project) -> list[FolderEntry]:
    return [
        (DOCKERFILE, project.dockerfile.resolve()),
        (PINS, project.pins.resolve()),
        (LOCK, (project.lock or project.pins).resolve()),
        *([(REQUIREMENTS, project.requirements)] if project.requirements else []),
        *((path.name, path) for path in project.code),
        *((f"build/wheels/{path.name}", path) for path in project.list_wheels() if project.copies_wheels),
        *((f"build/extra/{path.name}", path) for path in project.list_extra_wheels() if project.copies_wheels),
        *((f"build/package/{path.name}", path) for path in sorted(project.package_wheel_folder.glob("*.whl"))),
    ]
