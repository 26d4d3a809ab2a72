"""Build the image of the queue's scheduler: Python, swarmtrain, and the few packages that it needs itself; neither torch nor user code."""

from __future__ import annotations

import io
import re
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

from swarmtrain.errors import ImageError
from swarmtrain.images import wheels
from swarmtrain.images.base_image import ensure_base_image
from swarmtrain.images.builder import build_image_from_tar
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error
from swarmtrain.images.project import LOCK, SHIPPED_FILES

_DOCKERFILE = """\
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE} AS wheels
RUN python3 -m venv /opt/venv
COPY wheels/ /wheels/
RUN /opt/venv/bin/pip install --no-index --no-deps --no-cache-dir --disable-pip-version-check --no-compile /wheels/*.whl \\
    && /opt/venv/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/venv/lib

FROM ${BASE_IMAGE}
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=wheels /opt/venv /opt/venv
CMD ["python3", "-m", "swarmtrain.queueing"]
"""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+")


def build_queue_image(client: ImageClient, tag: str, *, report_progress: ProgressReporter) -> None:
    """Build the image of the scheduler from pinned wheels whose hashes are checked, and tag it `tag`. Raises ImageError."""
    try:
        architecture = str(client.version()["Arch"])
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {tag}", hint="docker info shows why") from None
    base_image = ensure_base_image(client, None, report_progress=report_progress)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        lock = folder / "queue.lock"
        lock.write_text(select_locked_pins((SHIPPED_FILES / LOCK).read_text(), list_required_packages("swarmtrain")))
        report_progress("downloading wheels")
        machine = wheels.MACHINES.get(architecture, architecture)
        wheels.download_wheels(folder / "wheels", machine, "--no-deps", "--require-hashes", f"--requirement={lock}")
        wheels.build_swarmtrain_wheel(folder / "package", report_progress=report_progress)
        with tempfile.TemporaryFile() as tar_file:
            with tarfile.open(fileobj=tar_file, mode="w") as archive:
                content = _DOCKERFILE.encode()
                entry = tarfile.TarInfo("Dockerfile")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
                for wheel in sorted([*(folder / "wheels").glob("*.whl"), *(folder / "package").glob("*.whl")]):
                    archive.add(wheel, f"wheels/{wheel.name}")
            build_image_from_tar(client, tar_file, tag, labels={}, build_args={"BASE_IMAGE": base_image}, report_progress=report_progress)


def list_required_packages(name: str) -> set[str]:
    """Return the normalized names of the installed packages that the package `name` requires, directly or not, without its extras."""
    required: set[str] = set()
    pending = [name]
    while pending:
        try:
            requirements = metadata.requires(pending.pop()) or []
        except metadata.PackageNotFoundError:  # not needed on this platform
            continue
        for requirement in requirements:
            match = _NAME_PATTERN.match(requirement)
            if match and "extra ==" not in requirement and (found := _normalize(match[0])) not in required:
                required.add(found)
                pending.append(found)
    return required


def select_locked_pins(lock_text: str, packages: set[str]) -> str:
    """Return the pins of `packages`, with their hashes, from the text of a lock file."""
    joined_lines = lock_text.replace("\\\n", " ").splitlines()
    pins = [line for line in joined_lines if "==" in line and _normalize(line.partition("==")[0]) in packages]
    return "".join(f"{' '.join(line.split())}\n" for line in pins)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
