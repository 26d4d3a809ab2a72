"""A venv that is made beside the one that is there, and takes its place when it is whole.

PATH                 a link to the environment that is used; a change is its renaming
PATH.made/KEY        an environment; KEY stands for its list of versions, its wheels, and the Python that it was made with
PATH.made/wheels     what comes with the list, while an environment is made        PATH.made/lock   held by whoever makes one
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO

from swarmtrain.host.spec import replace
from swarmtrain.process import run, start

_LAST_LINES = 6
_POLL = 0.1
_OF_PYTHON = "import platform, sys; print(platform.python_version(), platform.machine(), sys.base_prefix)"
_ASKED_WITHIN = 60.0


class Environment:
    """The environment at one path, for whoever holds `lock`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self.lock = lock
        self._made = made(path)

    def key(self, python: str, digest: str) -> str:
        """Return what stands for the content `digest` with `python`. Raises ProcessError if that is no Python."""
        return sha256(f"{digest} {run([python, '-I', '-c', _OF_PYTHON], timeout=_ASKED_WITHIN)}".encode()).hexdigest()[:16]

    def is_current(self, key: str) -> bool:
        """Whether the environment that is used is that of `key`. Raises FileExistsError if something else is at its path."""
        if self.path.exists() and not self.path.is_symlink():
            raise FileExistsError(17, "is there, and swarmtrain env has not made it", str(self.path))
        return self.path.is_symlink() and self.path.readlink() == self._target(key) and (self.path / "bin" / "python3").exists()

    def put(self, name: str, offset: int, content: str) -> None:
        """Write a part of a wheel, in base64."""
        folder = self._made / "wheels"
        folder.mkdir(exist_ok=True)
        with (folder / name).open("ab") as file:
            file.truncate(offset)
            file.write(base64.b64decode(content))

    def make(self, python: str, key: str, lines: Sequence[str], *, index: bool, gone: Callable[[], bool]) -> dict[str, str]:
        """Make it from `lines` of requirements, whose paths are from the wheels, and use it; return an `error` and `output`, or nothing.

        Without `index`, the wheels are all there is. When whoever asked is `gone`, it is given up. Whatever goes wrong, the old one stays.
        """
        new, wheels = self._made / key, self._made / "wheels"
        used = self.path.readlink().name if self.path.is_symlink() else ""
        self._clean({used, "lock", "wheels"} - {key})
        wheels.mkdir(exist_ok=True)
        replace(wheels / "list.txt", "".join(f"{line}\n" for line in lines))
        pip = [str(new / "bin" / "python3"), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
        sources = [] if index else ["--no-index", "--find-links=."]
        steps = {
            f"{python} cannot make a venv": [python, "-I", "-m", "venv", str(new)],
            # Older Pythons put one into each venv; which one there is, if any, the list says.
            "pip cannot remove setuptools": [*pip, "uninstall", "--yes", "setuptools"],
            "pip cannot install the list": [*pip, "install", "--no-deps", *sources, "--requirement=list.txt"],
            "the list is not whole": [*pip, "check"],
        }
        try:
            for error, argv in steps.items():
                code, output = _run(argv, wheels, gone)
                if code:
                    return {"error": error, "output": output}
            link = self._made / "link"
            link.symlink_to(self._target(key))
            link.replace(self.path)
            used = key
            return {}
        finally:
            self._clean({used, "lock"})

    def _target(self, key: str) -> Path:
        return Path(self._made.name) / key

    def _clean(self, kept: set[str]) -> None:
        for path in self._made.iterdir():
            if path.name not in kept:
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path, ignore_errors=True)


def made(path: Path) -> Path:
    """Return the folder of what is made for the environment at `path`."""
    return path.with_name(f"{path.name}.made")


def _run(argv: list[str], cwd: Path, gone: Callable[[], bool]) -> tuple[int, str]:
    """Return the exit code and the last lines; when whoever asked is gone, all that was started is ended."""
    log = cwd / "log"
    with log.open("wb") as output:
        child = start(argv, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, new_session=True, die_with_parent=True)
    while child.poll() is None:
        if gone():
            os.killpg(child.pid, 9)
            child.wait()
            return 130, "interrupted"
        time.sleep(_POLL)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return child.returncode, "\n".join(lines[-_LAST_LINES:])
