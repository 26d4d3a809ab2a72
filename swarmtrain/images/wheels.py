"""The wheels that go into an image: downloaded once beside the user's files, so that the build itself needs no network."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import ImageError, ProcessError
from swarmtrain.images.engine import Say
from swarmtrain.images.project import Project, checkout

PYTHON = "3.11"
"""The version in both base images."""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""What an engine calls its processor: what a wheel calls it."""
# What pip writes beside a wheel's own files when it installs it.
_OF_PIP = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
_LIBC = ("_2_36", "_2_28", "_2_27", "_2_26", "_2_17", "2014")


def third_party(project: Project, architecture: str, *, say: Say) -> None:
    """Fill the project's folder of wheels with what it pins, for the engine's `architecture`.

    Every file but torch's is checked against the lock. Nothing is downloaded while the pins stay as they are. Raises ImageError.
    """
    locked = project.lock.read_bytes() if project.lock else b""
    machine = MACHINES.get(architecture, architecture)
    wanted = _digest(project.pins.read_bytes(), locked, machine)
    if _complete(project.wheels, wanted):
        return
    say(f"downloading wheels to {project.wheels}")
    if not locked:
        say(f"{project.pins} has no image.lock beside it: no hash is checked; swarmtrain image lock makes one")
    shutil.rmtree(project.wheels, ignore_errors=True)
    if project.lock:
        download(project.wheels, machine, "--no-deps", "--require-hashes", f"--requirement={project.lock}")
    else:
        download(project.wheels, machine, "--no-deps", f"--requirement={project.pins}")
    say("downloading torch")
    # With what else the build of torch that this index has may need: one for CUDA brings NVIDIA's libraries.
    download(project.wheels, machine, f"--find-links={project.wheels}", f"--constraint={project.pins}", "torch")
    _stamp(project.wheels).write_text(wanted)


def further(project: Project, architecture: str, *, say: Say) -> None:
    """Fill the project's folder of extra wheels with what its own requirements.txt names beyond `third_party`'s. Raises ImageError."""
    machine = MACHINES.get(architecture, architecture)
    if project.requirements is None:
        shutil.rmtree(project.extra, ignore_errors=True)
        return
    wanted = _digest(project.requirements.read_bytes(), project.pins.read_bytes(), machine)
    if _complete(project.extra, wanted):
        return
    say(f"downloading what {project.requirements} names to {project.extra}")
    shutil.rmtree(project.extra, ignore_errors=True)
    ours = f"--find-links={project.wheels}", f"--constraint={project.pins}"
    download(project.extra, machine, *ours, f"--requirement={project.requirements}")
    for wheel in project.extra.glob("*.whl"):
        if (project.wheels / wheel.name).exists():
            wheel.unlink()
    _stamp(project.extra).write_text(wanted)


def own(folder: Path, *, say: Say) -> None:
    """Put swarmtrain's own wheel into `folder`, alone. Raises ImageError.

    It is made from the checkout that runs, or from the files that are installed: what is here is what the nodes get.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if source := checkout():
        say(f"making swarmtrain's wheel from {source}")
        # Without a package index in reach: what makes the wheel may be here already.
        isolation = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
        _pip("wheel", "--no-deps", *isolation, f"--wheel-dir={folder}", str(source))
    else:
        say("making swarmtrain's wheel from what is installed")
        repack("swarmtrain", folder)


def repack(name: str, into: Path) -> None:
    """Write into a folder the wheel of an installed distribution of pure Python, from its files; the same bytes each time."""
    found = metadata.distribution(name)
    files = [file for file in found.files or () if ".." not in file.parts and "__pycache__" not in file.parts and file.name not in _OF_PIP]
    with zipfile.ZipFile(into / f"{found.name}-{found.version}-py3-none-any.whl", "w") as wheel:
        for file in sorted(files):
            wheel.writestr(zipfile.ZipInfo(str(file)), file.read_binary())
        record = next(str(file) for file in found.files or () if file.name == "RECORD")
        wheel.writestr(zipfile.ZipInfo(record), "".join(f"{file},,\n" for file in sorted(files)))


def download(into: Path, machine: str, *what: str) -> None:
    """Download the wheels of `what`, pip's own arguments, for Python in an image on `machine`. Raises ImageError."""
    into.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux{version}_{machine}" for version in _LIBC]
    _pip("download", "--only-binary=:all:", f"--python-version={PYTHON}", *platforms, f"--dest={into}", *what)


def _digest(*parts: bytes | str) -> str:
    return hashlib.sha256("\0".join([PYTHON, *(part if isinstance(part, str) else part.hex() for part in parts)]).encode()).hexdigest()


def _complete(folder: Path, wanted: str) -> bool:
    return _stamp(folder).exists() and _stamp(folder).read_text() == wanted


def _stamp(folder: Path) -> Path:
    return folder / ".complete"


def _pip(*arguments: str) -> None:
    try:
        process.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])
    except ProcessError as error:
        raise ImageError(error.message, place="image wheels", hint=_hint(error.output)) from None


def _hint(output: str) -> str:
    if "No module named pip" in output:
        return f"{sys.executable} -m ensurepip"
    if "ResolutionImpossible" in output or "conflicting dependencies" in output:
        return "an image has one version of each package: ask for the one above, or put a requirements/image.txt of your own in the folder"
    if "DO NOT MATCH THE HASHES" in output:
        return "the index gave another file than the one that is pinned; pip config list shows which index that is"
    return "is a package index in reach? pip config list"
