"""requirements/image.lock: the pins of requirements/image.txt with the hashes of the exact files.

The pins in image.txt have no hashes, because the file also serves as constraints (`pip install -c`): with a single hash, pip would require
hashes for all packages. torch is not in the lock file: a package index for another CUDA version serves other files of the same version.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from swarmtrain.errors import ImageError
from swarmtrain.images import wheels
from swarmtrain.images.image_client import ProgressReporter
from swarmtrain.images.project import LOCK, PINS

_HEADER = """\
# Generated from image.txt by `swarmtrain image lock`; run it again whenever image.txt changes.
# These are the files for Python {python} on {machines}; pip accepts no others.
"""
_PIN_PATTERN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def write_lock_file(folder: Path, *, report_progress: ProgressReporter) -> Path:
    """Write the lock file of the pins in `folder` and return its path. Raises ImageError if there are no pins, or pip fails."""
    pins = folder / PINS
    if not pins.is_file():
        hint = "nothing to do: a folder without this file uses swarmtrain's own pins, which are already locked"
        raise ImageError(f"there is no {PINS} to lock", place=str(folder), hint=hint)
    digests_by_pin: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as temporary_folder:
        plain_requirements = Path(temporary_folder) / "pins.txt"
        plain_requirements.write_text("".join(f"{pin}\n" for pin in _parse_pins_without_hashes(pins.read_text())))
        for machine in wheels.MACHINES.values():
            report_progress(f"downloading the wheels for {machine}")
            download_folder = Path(temporary_folder) / machine
            wheels.download_wheels(download_folder, machine, "--no-deps", f"--requirement={plain_requirements}")
            for pin, digest in hash_wheels(download_folder.glob("*.whl")):
                digests_by_pin.setdefault(pin, set()).add(digest)
    header = _HEADER.format(python=wheels.PYTHON_VERSION, machines=" and ".join(wheels.MACHINES.values()))
    lines = [
        " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(digests_by_pin[pin]))]) for pin in sorted(digests_by_pin)
    ]
    lock = folder / LOCK
    lock.write_text(header + "\n".join(lines) + "\n")
    return lock


def check_lock_file(pins_file: Path, lock_file: Path) -> None:
    """Check that `lock_file` contains the pins of `pins_file`. Raises ImageError if it does not."""
    if changed := sorted(_parse_pins_without_hashes(pins_file.read_text()) ^ set(_parse_pins(lock_file.read_text()))):
        raise ImageError(
            f"differs from {pins_file.name} in {', '.join(changed)}",
            place=str(lock_file),
            hint=f"swarmtrain image lock {pins_file.parents[1]}",
        )


def hash_wheels(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Return (name==version, SHA-256) of each wheel."""
    pin_hashes = []
    for file in files:
        name, version = file.name.split("-")[:2]
        pin_hashes.append((_normalize_pin(name, version), hashlib.sha256(file.read_bytes()).hexdigest()))
    return pin_hashes


def _parse_pins_without_hashes(pins: str) -> set[str]:
    return {pin for pin in _parse_pins(pins) if not pin.startswith("torch==")}


def _parse_pins(text: str) -> list[str]:
    return [_normalize_pin(*match) for match in _PIN_PATTERN.findall(text)]


def _normalize_pin(name: str, version: str) -> str:
    return f"{normalize_name(name)}=={version}"


def normalize_name(name: str) -> str:
    """Return the package name in the form in which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()
