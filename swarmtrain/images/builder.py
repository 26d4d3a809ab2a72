"""Build images with the engine's classic builder (not BuildKit), without a network that reaches others: all inputs are on this machine."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from swarmtrain.errors import ImageError
from swarmtrain.images import contents, lock_file, wheels
from swarmtrain.images import folder_archive as folders
from swarmtrain.images import project as projects
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error, follow_build_output
from swarmtrain.images.project import DOCKERFILE, LOCK, PINS, REQUIREMENTS, Project
from swarmtrain.images.transfer_progress import pull_image_if_missing

BaseImageSource = Callable[[ImageClient, ProgressReporter], str]
"""Returns the name of a base image that the engine has."""
_WHEEL_FOLDER, _WHEEL_URL = "srv/wheels", "http://127.0.0.1:8000/"
PIP_ARGS = f"--no-index --find-links={_WHEEL_URL} --disable-pip-version-check --progress-bar=off"


def build_image(
    client: ImageClient,
    context: Path,
    tag: str,
    *,
    base_image: str | BaseImageSource | None = None,
    report_progress: ProgressReporter,
) -> None:
    """Build the image of the project in the folder `context`, and tag it `tag`.

    `base_image`: by default Python's official image, with a C++ compiler if torch supports GPUs. A function is called while wheels are
    downloaded. Raises ImageError with the output of the failing step, or if the base image cannot be pulled.
    """
    project = projects.find_project(context)
    if project.lock:
        lock_file.check_lock_file(project.pins, project.lock)
    machine = find_machine(client, tag)
    if isinstance(base_image, str):
        ensure_base_image(client, base_image, report_progress=report_progress)  # before the long downloads
    with ThreadPoolExecutor(2) as pool:
        package = pool.submit(wheels.build_swarmtrain_wheel, project.package_wheel_folder, report_progress=report_progress)
        if callable(base_image):
            base = pool.submit(base_image, client, report_progress)
        else:
            base = pool.submit(ensure_base_image, client, base_image, report_progress=report_progress)
        wheels.download_pinned_wheels(project, machine, report_progress=report_progress)
        wheels.download_extra_wheels(project, machine, report_progress=report_progress)
        package.result()
    if base_image is None and wheels.can_compile_for_gpus(project.wheel_folder):
        # Only the downloads show this. Compared to them, the image without a compiler is small, and it need not be available.
        base_name = ensure_base_image(client, None, needs_compiler=True, report_progress=report_progress)
    else:
        base_name = base.result()
    build_args = {
        "BASE_IMAGE": base_name,
        "PIP_ARGS": "--no-index --find-links=/wheels" if project.copies_wheels else PIP_ARGS,
        "HASHES": "--require-hashes" if project.lock else "",
        "PACKAGES": _compute_names_digest(project.list_wheels()),
        "EXTRA_PACKAGES": _compute_names_digest(project.list_extra_wheels()),
    }
    served_wheels = [] if project.copies_wheels else [*project.list_wheels(), *project.list_extra_wheels()]
    try:
        with tempfile.TemporaryFile(dir=context / "build") as tar_file:
            write_build_context(project, tar_file)
            build_image_from_tar(
                client,
                tar_file,
                tag,
                build_args=build_args,
                labels=contents.compute_image_contents(project).to_labels(),
                served_wheels=served_wheels,
                report_progress=report_progress,
            )
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {tag}") from None


def ensure_base_image(
    client: ImageClient, requested_image: str | None, *, needs_compiler: bool = False, report_progress: ProgressReporter
) -> str:
    """Return the name of a base image that the engine has: `requested_image`, or Python's official image. It is pulled if needed.

    `needs_compiler`: whether the official image must have a C++ compiler. Raises ImageError if the image cannot be pulled.
    """
    image = requested_image or ("python:3.11-bookworm" if needs_compiler else "python:3.11-slim-bookworm")
    hint = "use --base with an image that the engine has; swarmtrain lab base-image creates one without Docker Hub"
    pull_image_if_missing(client, image, report_progress, hint=hint)
    return image


def find_machine(client: ImageClient, tag: str) -> str:
    """Return the processor architecture of the engine that builds the image `tag`, as wheels name it. Raises ImageError if none answers."""
    try:
        architecture = str(client.version()["Arch"])
    except OSError as error:
        raise ImageError(
            f"no Docker engine available to build with: {describe_engine_error(error)}",
            place=f"image {tag}",
            hint="run docker info to see why the engine is not reachable",
        ) from None
    return wheels.MACHINES.get(architecture, architecture)


def build_image_from_tar(
    client: ImageClient,
    tar_file: IO[bytes],
    tag: str,
    *,
    labels: Mapping[str, str],
    build_args: Mapping[str, str] | None = None,
    served_wheels: Sequence[Path] = (),
    report_progress: ProgressReporter,
) -> None:
    """Build an image from the build context `tar_file` on the engine, and tag it `tag`.

    The build reaches no network but a server with `served_wheels`, which pip finds with PIP_ARGS. Raises ImageError with the output of the
    failing step.
    """
    tar_file.seek(0)
    build_args = dict(build_args or {})
    try:
        with ExitStack() as stack:
            network = stack.enter_context(_serve_wheels(client, build_args["BASE_IMAGE"], served_wheels)) if served_wheels else "none"
            stream = client.build(
                fileobj=tar_file,
                custom_context=True,
                tag=tag,
                buildargs=build_args,
                labels=dict(labels),
                network_mode=network,
                rm=True,
                forcerm=True,
                decode=True,
            )
            follow_build_output(stream, location=f"image {tag}", report_progress=report_progress)
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {tag}") from None


@contextmanager
def _serve_wheels(client: ImageClient, base_image: str, served_wheels: Sequence[Path]) -> Iterator[str]:
    """Context manager that serves wheels from one folder, and yields the network mode of builds that can install them with PIP_ARGS.

    A container on the engine serves them on the loopback of a network of its own, which reaches nothing else. The alternative, to copy
    them into a stage and the installed packages out of it, takes longer. Raises OSErrors.
    """
    argv = ["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", f"/{_WHEEL_FOLDER}"]
    host_config = client.create_host_config(network_mode="none")
    container = client.create_container(base_image, entrypoint=argv, command=[], host_config=host_config)["Id"]
    try:
        with tempfile.TemporaryFile(dir=served_wheels[0].parent) as tar_file:
            with tarfile.open(fileobj=tar_file, mode="w") as archive:
                folders.add_files_to_archive(archive, [(f"{_WHEEL_FOLDER}/{path.name}", path) for path in served_wheels])
            tar_file.seek(0)
            client.put_archive(container, "/", tar_file)
        client.start(container)
        yield f"container:{container}"
    finally:
        client.remove_container(container, force=True, v=True)


def _compute_names_digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(" ".join(path.name for path in files).encode()).hexdigest()[:12] if files else ""


def write_build_context(project: Project, tar_file: IO[bytes]) -> None:
    """Write the build context as a tar archive: the user's files and the prepared wheels. Equal contents give a byte-identical archive."""
    files = [
        (DOCKERFILE, project.dockerfile.resolve()),
        (PINS, project.pins.resolve()),
        (LOCK, (project.lock or project.pins).resolve()),
        *([(REQUIREMENTS, project.requirements)] if project.requirements else []),
        *((path.name, path) for path in project.code),
        *((f"build/wheels/{path.name}", path) for path in project.list_wheels() if project.copies_wheels),
        *((f"build/extra/{path.name}", path) for path in project.list_extra_wheels() if project.copies_wheels),
        *((f"build/package/{path.name}", path) for path in sorted(project.package_wheel_folder.glob("*.whl"))),
    ]
    with tarfile.open(fileobj=tar_file, mode="w") as archive:
        folders.add_files_to_archive(archive, files)
