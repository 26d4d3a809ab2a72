"""Build the image of the queue's scheduler: Python, swarmtrain, and the few packages that it needs itself; neither torch nor user code."""

from __future__ import annotations

import re
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

from swarmtrain.images import folder_archive as folders
from swarmtrain.images import lock_file, wheels
from swarmtrain.images.builder import PIP_ARGS, build_image_from_tar, ensure_base_image, find_machine
from swarmtrain.images.image_client import ImageClient, ProgressReporter
from swarmtrain.images.project import LOCK, SHIPPED_FILES

_DOCKERFILE = """\
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ARG PIP_ARGS
COPY requirements.txt /opt/requirements.txt
RUN python3 -m venv /opt/venv \\
    && pip install ${PIP_ARGS} --require-hashes --no-deps --no-cache-dir --no-compile -r /opt/requirements.txt \\
    && python3 -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/venv/lib
CMD ["python3", "-m", "swarmtrain.queueing"]
"""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+")


def build_queue_image(client: ImageClient, tag: str, *, base_image: str | None = None, report_progress: ProgressReporter) -> None:
    """Build the image of the scheduler from pinned wheels whose hashes are checked, and tag it `tag`.

    `base_image`: by default Python's official image. Raises ImageError.
    """
    machine = find_machine(client, tag)
    build_args = {"BASE_IMAGE": ensure_base_image(client, base_image, report_progress=report_progress), "PIP_ARGS": PIP_ARGS}
    with tempfile.TemporaryDirectory() as folder_name, tempfile.TemporaryFile() as tar_file:
        folder = Path(folder_name)
        lock = folder / "queue.lock"
        lock.write_text(_select_locked_pins((SHIPPED_FILES / LOCK).read_text(), _list_required_packages("swarmtrain")))
        report_progress("downloading wheels")
        wheels.download_wheels(folder / "wheels", machine, "--no-deps", "--require-hashes", f"--requirement={lock}")
        wheels.build_swarmtrain_wheel(folder / "package", report_progress=report_progress)
        files = sorted(folder.glob("*/*.whl"))
        requirements = "".join(f"{pin} --hash=sha256:{digest}\n" for pin, digest in lock_file.hash_wheels(files))
        with tarfile.open(fileobj=tar_file, mode="w") as archive:
            context = {"Dockerfile": _DOCKERFILE.encode(), "requirements.txt": requirements.encode()}
            folders.add_files_to_archive(archive, context.items())
        build_image_from_tar(client, tar_file, tag, labels={}, build_args=build_args, served_wheels=files, report_progress=report_progress)


def _list_required_packages(name: str) -> set[str]:
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
            if match and "extra ==" not in requirement and (found := lock_file.normalize_name(match[0])) not in required:
                required.add(found)
                pending.append(found)
    return required


def _select_locked_pins(lock_text: str, packages: set[str]) -> str:
    """Return the pins of `packages`, with their hashes, from the text of a lock file."""
    lines = lock_text.replace("\\\n", " ").splitlines()
    return "".join(f"{line}\n" for line in lines if "==" in line and lock_file.normalize_name(line.partition("==")[0]) in packages)
