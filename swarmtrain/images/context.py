"""The build context: what the Dockerfile copies, packed the same way each time."""

from __future__ import annotations

import tarfile
from typing import IO

from swarmtrain.images import folder
from swarmtrain.images.project import DOCKERFILE, LOCK, PINS, REQUIREMENTS, Project


def pack(project: Project, into: IO[bytes]) -> None:
    """Write the build context as a tar: the user's files and what was prepared, the same bytes for the same contents."""
    with tarfile.open(fileobj=into, mode="w") as packed:
        folder.pack(packed, _entries(project))


def _entries(project: Project) -> list[folder.Entry]:
    return [
        (DOCKERFILE, project.dockerfile.resolve()),
        (PINS, project.pins.resolve()),
        (LOCK, (project.lock or project.pins).resolve()),
        *([(REQUIREMENTS, project.requirements)] if project.requirements else []),
        *((path.name, path) for path in project.code),
        *((f"build/wheels/{path.name}", path) for path in sorted(project.wheels.glob("*.whl"))),
        *((f"build/extra/{path.name}", path) for path in sorted(project.extra.glob("*.whl"))),
        *((f"build/package/{path.name}", path) for path in sorted(project.package.glob("*.whl"))),
    ]
