"""Serves wheels to the build of an image. The alternative, to copy them into a stage and the installed packages out of it, takes longer."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from swarmtrain.images import folder_archive as folders
from swarmtrain.images.image_client import ImageClient
from swarmtrain.images.project import Project

_URL = "http://127.0.0.1:8000"
PIP_ARGS = f"--no-index --find-links={_URL}/wheels/ --find-links={_URL}/extra/ --disable-pip-version-check --progress-bar=off"
_FOLDER = "srv"


@contextmanager
def serve_wheels(client: ImageClient, base_image: str, project: Project) -> Iterator[str]:
    """Context manager that serves the wheels of `project`, and yields the network mode of builds that can install them with PIP_ARGS.

    A container on the engine serves them on the loopback of a network of its own, which reaches nothing else. Raises OSErrors.
    """
    argv = ["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", f"/{_FOLDER}"]
    host_config = client.create_host_config(network_mode="none")
    container = client.create_container(base_image, entrypoint=argv, command=[], host_config=host_config)["Id"]
    try:
        with tempfile.TemporaryFile(dir=project.folder / "build") as tar_file:
            with tarfile.open(fileobj=tar_file, mode="w") as archive:
                wheels = [(f"{_FOLDER}/wheels/{path.name}", path) for path in project.list_wheels()]
                extra = [(f"{_FOLDER}/extra/{path.name}", path) for path in project.list_extra_wheels()]
                folders.add_folder_entries(archive, [f"{_FOLDER}/wheels/none", f"{_FOLDER}/extra/none"])
                folders.add_entries_to_archive(archive, [*wheels, *extra])
            tar_file.seek(0)
            client.put_archive(container, "/", tar_file)
        client.start(container)
        yield f"container:{container}"
    finally:
        client.remove_container(container, force=True, v=True)
