"""The wheels that go into an image: downloaded once beside the Dockerfile, so that the build itself needs no network."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import swarmtrain
from swarmtrain import process
from swarmtrain.errors import ImageError, ProcessError
from swarmtrain.images.engine import Say

_PYTHON = "3.11"  # of both base images
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def third_party(context: Path, architecture: str, *, say: Say) -> Path:
    """Fill `build/wheels` under the context with what requirements/image.txt pins, for the engine's `architecture`; return it.

    Nothing is downloaded while that file stays as it is. Raises ImageError.
    """
    pins, wheels = context / "requirements" / "image.txt", context / "build" / "wheels"
    machine = _MACHINES.get(architecture, architecture)
    wanted = hashlib.sha256(pins.read_bytes() + f"{_PYTHON} {machine}".encode()).hexdigest()
    stamp = wheels / ".complete"
    if stamp.exists() and stamp.read_text() == wanted:
        return wheels
    say(f"downloading wheels to {wheels}")
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    _pip(
        "download",
        "--only-binary=:all:",
        "--no-deps",
        f"--python-version={_PYTHON}",
        *_platforms(machine),
        f"--dest={wheels}",
        f"--requirement={pins}",
    )
    stamp.write_text(wanted)
    return wheels


def own(context: Path, *, say: Say) -> Path:
    """Put swarmtrain's own wheel into `build/package` under the context and return that directory. Raises ImageError.

    It is made from the checkout that runs, or downloaded in the version that is installed.
    """
    package = context / "build" / "package"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    source = Path(swarmtrain.__file__).parents[1]
    if (source / "pyproject.toml").exists():
        say(f"making swarmtrain's wheel from {source}")
        _pip("wheel", "--no-deps", f"--wheel-dir={package}", str(source))
    else:
        say(f"downloading the wheel of swarmtrain {swarmtrain.__version__}")
        _pip("download", "--no-deps", "--only-binary=:all:", f"--dest={package}", f"swarmtrain=={swarmtrain.__version__}")
    return package


def _platforms(machine: str) -> list[str]:
    return [f"--platform=manylinux{version}_{machine}" for version in ("_2_36", "_2_28", "_2_27", "_2_26", "_2_17", "2014")]


def _pip(*arguments: str) -> None:
    try:
        process.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])
    except ProcessError as error:
        hint = f"{sys.executable} -m ensurepip" if "No module named pip" in error.output else "is a package index in reach? pip config list"
        raise ImageError(error.message, place="image wheels", hint=hint) from None
