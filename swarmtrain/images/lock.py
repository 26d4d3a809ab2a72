"""requirements/image.lock: what requirements/image.txt pins, with the hashes of the very files that are meant.

The pins stay plain, because they are constraints too (`pip install -c`), and one hash among those would make pip want
hashes of everything. torch is in the pins alone: an index for another CUDA has other files under the same version.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from swarmtrain.errors import ImageError
from swarmtrain.images import wheels
from swarmtrain.images.engine import Say
from swarmtrain.images.project import LOCK, PINS

_HEAD = """\
# Made from image.txt by `swarmtrain image lock`, which is to be run again whenever that changes.
# These are the files for Python {python} on {machines}; pip takes no others.
"""
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def renew(folder: Path, *, say: Say) -> Path:
    """Write the lock of the pins in `folder` and return its path. Raises ImageError."""
    pins = folder / PINS
    if not pins.is_file():
        hint = "a folder without one gets swarmtrain's own, which are locked"
        raise ImageError(f"there is no {PINS} to lock", place=str(folder), hint=hint)
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "pins.txt"
        plain.write_text("".join(f"{pin}\n" for pin in _locked(pins.read_text())))
        for machine in wheels.MACHINES.values():
            say(f"downloading the wheels for {machine}")
            into = Path(scratch) / machine
            wheels.download(into, machine, "--no-deps", f"--requirement={plain}")
            for pin, digest in hashes(into.glob("*.whl")):
                found.setdefault(pin, set()).add(digest)
    head = _HEAD.format(python=wheels.PYTHON, machines=" and ".join(wheels.MACHINES.values()))
    lines = [" \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(found[pin]))]) for pin in sorted(found)]
    lock = folder / LOCK
    lock.write_text(head + "\n".join(lines) + "\n")
    return lock


def check(pins: Path, lock: Path) -> None:
    """Raise ImageError unless `lock` holds what `pins` names now."""
    if changed := sorted(_locked(pins.read_text()) ^ set(_pinned(lock.read_text()))):
        raise ImageError(
            f"differs from {pins.name} in {', '.join(changed)}", place=str(lock), hint=f"swarmtrain image lock {pins.parents[1]}"
        )


def hashes(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Return (name==version, SHA-256) of each wheel."""
    found = []
    for file in files:
        name, version = file.name.split("-")[:2]
        found.append((_pin(name, version), hashlib.sha256(file.read_bytes()).hexdigest()))
    return found


def _locked(pins: str) -> set[str]:
    return {pin for pin in _pinned(pins) if not pin.startswith("torch==")}


def _pinned(text: str) -> list[str]:
    return [_pin(*found) for found in _PIN.findall(text)]


def _pin(name: str, version: str) -> str:
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"
