"""The base image of images that are built in a lab, whose engines cannot pull Python's official one: Debian's own Python."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import LabError
from swarmtrain.images.image_client import ImageClient, ProgressReporter, describe_engine_error

_SUITE = "bookworm"
_NAME = "swarmtrain-base"
# python3, not python3-minimal: the standard library must be complete.
_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libgomp1")
_COMPILER_PACKAGES = ("g++", "python3-dev")


def create_base_image(client: ImageClient, report_progress: ProgressReporter, *, with_compiler: bool = False) -> str:
    """Return the name of a base image that the engine has: of Debian packages from this machine's apt sources, with Python 3.11.

    If the engine does not have it yet, it is imported from a tar file in the user's cache directory, which is created first if it does not
    exist. `with_compiler`: with a C++ compiler. Raises LabError if mmdebstrap is not installed, or the engine refuses the image;
    ProcessError if mmdebstrap fails.
    """
    tag, packages = (f"{_SUITE}-compiler", (*_PACKAGES, *_COMPILER_PACKAGES)) if with_compiler else (_SUITE, _PACKAGES)
    name = f"{_NAME}:{tag}"
    try:
        client.inspect_image(name)
    except OSError:
        report_progress(f"creating {name} from Debian packages")
    else:
        return name
    tar_path = get_cache_directory() / f"base-{_SUITE}-{'-'.join(packages)}.tar"
    if not tar_path.exists():
        _create_tar(tar_path, packages, report_progress)
    report_progress(f"importing {tar_path}")
    try:
        response = client.import_image_from_file(str(tar_path), repository=_NAME, tag=tag)
    except OSError as error:
        response = f"error: {describe_engine_error(error)}"
    if "error" in response:
        raise LabError(response.strip(), place=f"image {name}", hint=f"rm {tar_path}")
    return name


def get_cache_directory() -> Path:
    """Return this user's cache directory for files that take long to build."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmtrain"


def find_apt_sources(suite: str, apt_folder: Path = Path("/etc/apt")) -> list[Path]:
    """Return the apt source files of this machine that list the Debian release `suite`, from which its packages can be downloaded."""
    folder = apt_folder / "sources.list.d"
    files = [apt_folder / "sources.list", *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]
    suite_pattern = re.compile(rf"^(?:deb\s.*|Suites:.*)\s{re.escape(suite)}(?:\s|$)", re.MULTILINE)
    return [file for file in files if file.is_file() and suite_pattern.search(file.read_text(errors="replace"))]


def _create_tar(tar_path: Path, packages: tuple[str, ...], report_progress: ProgressReporter) -> None:
    if not shutil.which("mmdebstrap"):
        raise LabError("needs mmdebstrap, which is not installed", place="base image", hint="apt-get install -y mmdebstrap")
    report_progress(f"creating {tar_path} with mmdebstrap; this takes about 30 s, only the first time")
    tar_path.parent.mkdir(parents=True, exist_ok=True)
    staging_path = tar_path.with_name(f".{os.getpid()}-{tar_path.name}")
    options = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("man", "locale", "doc")]
    options += ["--variant=minbase", "--quiet", f"--include={','.join(packages)}"]
    try:
        process.run_command(["mmdebstrap", *options, _SUITE, str(staging_path), *map(str, find_apt_sources(_SUITE))])
        staging_path.rename(tar_path)
    finally:
        staging_path.unlink(missing_ok=True)
