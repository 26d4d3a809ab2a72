"""The Docker build context: the files that the Dockerfile copies, packed reproducibly."""

from __future__ import annotations

import tarfile
from typing import IO

from swarmtrain.images import folder_files
from swarmtrain.images.project import DOCKERFILE, LOCK, PINS, REQUIREMENTS, Project


def write_build_context(project: Project, output: IO[bytes]) -> None:
    """Write the build context as a tar: the user's files and the prepared wheels. Equal contents give equal bytes."""
    with tarfile.open(fileobj=output, mode="w") as archive:
        folder_files.add_entries(archive, _list_entries(project))


def _list_entries(project: Project) -> list[folder_files.ArchiveEntry]:
    return [
        (DOCKERFILE, project.dockerfile.resolve()),
        (PINS, project.pins.resolve()),
        (LOCK, (project.lock or project.pins).resolve()),
        *([(REQUIREMENTS, project.requirements)] if project.requirements else []),
        *((path.name, path) for path in project.code),
        *((f"build/wheels/{path.name}", path) for path in sorted(project.wheels.glob("*.whl"))),
        *((f"build/extra/{path.name}", path) for path in sorted(project.extra_wheels.glob("*.whl"))),
        *((f"build/package/{path.name}", path) for path in sorted(project.package_wheel.glob("*.whl"))),
    ]
