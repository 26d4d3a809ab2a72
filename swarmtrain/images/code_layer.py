"""Add code to an existing image as a separate layer, which is built and pushed in seconds."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from swarmtrain.cargo.docker_ignore import IGNORE_FILE, FolderEntry, list_files
from swarmtrain.errors import ImageError
from swarmtrain.images import contents
from swarmtrain.images import folder_archive as folders
from swarmtrain.images.builder import build_image_from_tar
from swarmtrain.images.image_client import ImageClient, ProgressReporter
from swarmtrain.images.transfer_progress import format_bytes, pull_image_if_missing
from swarmtrain.render.mounts import WORKSPACE


def add_code_layer(
    client: ImageClient,
    code_folders: Sequence[Path],
    base_image: str,
    tag: str,
    *,
    working_folder: Path,
    report_progress: ProgressReporter,
) -> None:
    """Build the image `tag`: `base_image` plus one layer for each folder in `code_folders`, copied to the folder of the run's script.

    Each folder keeps its path relative to `working_folder`; a folder outside of `working_folder` is copied under its base name. The layer
    is reproducible: equal files give an equal layer. Raises ImageError if a folder is missing or empty, or the build fails.
    """
    image = pull_image_if_missing(client, base_image, report_progress)
    image_contents = contents.read_image_contents(image)
    layers: list[Mapping[str, Path | bytes]] = []
    for path in code_folders:
        name, entries = _get_path_in_image(path, working_folder), _list_folder_entries(path)
        image_contents = image_contents.copy_with_added_folder(name, entries, base_image=base_image)
        layers.append({f"{name}/{entry}": file for entry, file in entries})
        report_progress(f"{path}: {len(entries)} files, {format_bytes(sum(file.lstat().st_size for _, file in entries))}")
    _build_layers(client, image, layers, tag, labels=image_contents.to_labels(), report_progress=report_progress)


def add_file_layer(
    client: ImageClient, files: Mapping[str, bytes], base_image: str, tag: str, *, report_progress: ProgressReporter
) -> None:
    """Build the image `tag`: `base_image` plus one layer with `files`, by their paths relative to the folder of the run's script.

    The layer is reproducible: equal files give an equal layer. Raises ImageError if the build fails.
    """
    image = pull_image_if_missing(client, base_image, report_progress)
    report_progress(f"{len(files)} files, {format_bytes(sum(map(len, files.values())))}")
    _build_layers(client, image, [files], tag, labels={}, report_progress=report_progress)


def _build_layers(
    client: ImageClient,
    base: Mapping[str, Any],
    layers: Sequence[Mapping[str, Path | bytes]],
    tag: str,
    *,
    labels: Mapping[str, str],
    report_progress: ProgressReporter,
) -> None:
    """Build the image `tag`: the inspected image `base` plus `layers` of files in WORKSPACE, for the user that the image runs as."""
    user = base["Config"].get("User")
    lines = [f"FROM {base['Id']}"]
    with tempfile.TemporaryFile() as tar_file:
        with tarfile.open(fileobj=tar_file, mode="w") as archive:
            for number, files in enumerate(layers, start=1):
                # Copy WORKSPACE itself too: if the builder created this folder, the layer would contain the current time.
                lines.append(f"COPY {f'--chown={user} ' if user else ''}{number}/ /")
                folder = f"{number}{WORKSPACE}"
                archive_files = [(str(PurePosixPath(folder, name)), file) for name, file in files.items()]
                folders.add_files_to_archive(archive, archive_files, world_writable_folder=folder)
            folders.add_files_to_archive(archive, [("Dockerfile", "".join(f"{line}\n" for line in lines).encode())])
        build_image_from_tar(client, tar_file, tag, labels=labels, report_progress=report_progress)


def _get_path_in_image(path: Path, working_folder: Path) -> str:
    resolved, resolved_working_folder = path.resolve(), working_folder.resolve()
    return str(resolved.relative_to(resolved_working_folder)) if resolved.is_relative_to(resolved_working_folder) else resolved.name


def _list_folder_entries(folder: Path) -> list[FolderEntry]:
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
        raise ImageError(reason, place=str(folder), hint="list individual files, not folders, in runner.code")
    if not (entries := list_files(folder)):
        raise ImageError(f"is empty, or {IGNORE_FILE} excludes all its files", place=str(folder))
    return entries
