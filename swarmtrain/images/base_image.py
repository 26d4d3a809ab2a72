"""The base image: Python's official image or, if it cannot be pulled, one built from Debian packages of this machine's apt sources."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import ImageError
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error
from swarmtrain.images.transfer_progress import follow_layer_transfer

_SUITE = "bookworm"


@dataclass(frozen=True)
class DefaultImage:
    """A default base image: Python's official one, and the name and packages of the one that is built from Debian packages instead."""

    official_name: str
    debian_name: str
    packages: tuple[str, ...]


# python3, not python3-minimal: the standard library must be complete.
_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libgomp1")
WITHOUT_COMPILER = DefaultImage("python:3.11-slim-bookworm", "swarmtrain-base:bookworm", _PACKAGES)
WITH_COMPILER = DefaultImage("python:3.11-bookworm", "swarmtrain-base:bookworm-compiler", (*_PACKAGES, "g++", "python3-dev"))


def ensure_base_image(
    client: ImageClient, requested_image: str | None, *, needs_compiler: bool = False, report_progress: ProgressReporter
) -> str:
    """Return the name of a base image that the engine has: `requested_image`, or Python's official image. The image is pulled if needed.

    If the default image cannot be pulled, build one from Debian packages and report that to `report_progress`. `needs_compiler`: whether
    a default image must have a C++ compiler. Raises ImageError if `requested_image` cannot be pulled, or if no image can be built.
    """
    default = WITH_COMPILER if needs_compiler else WITHOUT_COMPILER
    base = requested_image or default.official_name
    if _has_image(client, base):
        return base
    if requested_image is None and _has_image(client, default.debian_name):
        report_progress(f"base image: {default.debian_name}, built earlier on this machine from Debian packages")
        return default.debian_name
    try:
        report_progress(f"pulling {base}")
        follow_layer_transfer(client.pull(base, stream=True, decode=True), location=f"image {base}", report_progress=report_progress)
    except (OSError, ImageError) as error:
        message = describe_engine_error(error) if isinstance(error, OSError) else error.message
        if requested_image is not None:
            raise ImageError(
                f"cannot be pulled: {message}", place=f"image {base}", hint="use a base image that the engine already has, or omit --base"
            ) from None
        report_progress(f"{base} cannot be pulled ({message}); using Debian's own Python instead")
        return _build_debian_base_image(client, default, report_progress)
    return base


def get_cache_directory() -> Path:
    """Return this user's cache directory for files that take long to build."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmtrain"


def find_apt_sources(suite: str, apt_folder: Path = Path("/etc/apt")) -> list[Path]:
    """Return the apt source files of this machine that list the Debian release `suite`, from which its packages can be downloaded."""
    files = [
        apt_folder / "sources.list",
        *sorted((apt_folder / "sources.list.d").glob("*.list")),
        *sorted((apt_folder / "sources.list.d").glob("*.sources")),
    ]
    suite_pattern = re.compile(rf"^(?:deb\s.*|Suites:.*)\s{re.escape(suite)}(?:\s|$)", re.MULTILINE)
    return [file for file in files if file.is_file() and suite_pattern.search(file.read_text(errors="replace"))]


def _has_image(client: ImageClient, image: str) -> bool:
    try:
        client.inspect_image(image)
    except OSError:
        return False
    return True


def _build_debian_base_image(client: ImageClient, image: DefaultImage, report_progress: ProgressReporter) -> str:
    tar_path = get_cache_directory() / f"base-{_SUITE}-{'-'.join(image.packages)}.tar"
    if not tar_path.exists():
        _create_debian_tar(tar_path, image.packages, report_progress)
    report_progress(f"importing {tar_path} as {image.debian_name}")
    name, _, tag = image.debian_name.partition(":")
    try:
        response = client.import_image_from_file(str(tar_path), repository=name, tag=tag)
    except OSError as error:
        raise ImageError(describe_engine_error(error), place=f"image {image.debian_name}", hint=f"rm {tar_path}") from None
    if "error" in response:
        raise ImageError(response.strip(), place=f"image {image.debian_name}", hint=f"rm {tar_path}")
    return image.debian_name


def _create_debian_tar(tar_path: Path, packages: Sequence[str], report_progress: ProgressReporter) -> None:
    if not shutil.which("mmdebstrap"):
        raise ImageError(
            "no base image: it cannot be pulled, and mmdebstrap, which could create one, is not installed",
            hint="run apt-get install -y mmdebstrap, or use --base with an image that the engine already has",
        )
    report_progress(f"creating {tar_path} from Debian packages with mmdebstrap; this takes about 30 s, only the first time")
    tar_path.parent.mkdir(parents=True, exist_ok=True)
    staging_path = tar_path.with_name(f".{os.getpid()}-{tar_path.name}")
    sources = [str(file) for file in find_apt_sources(_SUITE)]
    size_options = [
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
    ]
    try:
        process.run_command(
            [
                "mmdebstrap",
                "--variant=minbase",
                "--quiet",
                *size_options,
                f"--include={','.join(packages)}",
                _SUITE,
                str(staging_path),
                *sources,
            ]
        )
        staging_path.rename(tar_path)
    finally:
        staging_path.unlink(missing_ok=True)
