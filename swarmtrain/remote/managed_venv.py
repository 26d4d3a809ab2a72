"""Managed venv: a new venv is built next to the current one, and replaces it once complete.

PATH                 symlink to the venv in use, replaced by a rename
PATH.made/KEY        a venv; KEY is a hash of its requirements, its wheels, and the Python that it was built with
PATH.made/wheels     uploaded wheels, during a build
PATH.made/lock       lock file, held by the process that builds
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

from swarmtrain.atomic_file import write_text_atomically
from swarmtrain.process import run_command, start_process

_OUTPUT_TAIL_LINES = 6
_POLL_SECONDS = 0.1
_PYTHON_IDENTITY_SCRIPT = "import platform, sys; print(platform.python_version(), platform.machine(), sys.base_prefix)"
_IDENTITY_TIMEOUT_SECONDS = 60.0


class ManagedVenv:
    """The managed venv at one path. To change it, the caller must hold the lock on the open file `lock`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self.lock = lock
        self._build_folder = get_build_folder(path)

    def compute_venv_key(self, interpreter: str, content_digest: str) -> str:
        """Return the key of a venv that is built with `interpreter` and whose content has the digest `content_digest`.

        Raises ProcessError if `interpreter` is not a Python interpreter.
        """
        identity = run_command([interpreter, "-I", "-c", _PYTHON_IDENTITY_SCRIPT], timeout=_IDENTITY_TIMEOUT_SECONDS)
        return sha256(f"{content_digest} {identity}".encode()).hexdigest()[:16]

    def is_venv_current(self, key: str) -> bool:
        """Return whether the venv in use has the key `key`.

        Raises FileExistsError if its path exists and is not a managed venv.
        """
        if self.path.exists() and not self.path.is_symlink():
            raise FileExistsError(17, "already exists and was not created by swarmtrain env", str(self.path))
        return (
            self.path.is_symlink()
            and Path(os.readlink(self.path)) == self._get_link_target(key)
            and (self.path / "bin" / "python3").exists()
        )

    def write_wheel_chunk(self, name: str, offset: int, content: str) -> None:
        """Write `content`, a chunk of the uploaded wheel `name` in base64, at the byte `offset` of the file."""
        folder = self._build_folder / "wheels"
        folder.mkdir(exist_ok=True)
        with (folder / name).open("ab") as file:
            file.truncate(offset)
            file.write(base64.b64decode(content))

    def build_and_activate_venv(
        self, interpreter: str, key: str, requirements: Sequence[str], *, use_index: bool, is_caller_gone: Callable[[], bool]
    ) -> dict[str, str]:
        """Build the venv with key `key` from `requirements`, whose paths are relative to the wheels folder, and activate it.

        Return `error` and `output` of a failed step; an empty dict if all succeeded. Without `use_index`, only the uploaded wheels are
        used. The build is aborted once `is_caller_gone` returns True. On any failure the previous venv stays active.
        """
        venv, wheels = self._build_folder / key, self._build_folder / "wheels"
        active_key = Path(os.readlink(self.path)).name if self.path.is_symlink() else ""
        self._remove_build_files_except({active_key, "lock", "wheels"} - {key})
        wheels.mkdir(exist_ok=True)
        write_text_atomically(wheels / "list.txt", "".join(f"{line}\n" for line in requirements))
        pip = [str(venv / "bin" / "python3"), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
        index_options = [] if use_index else ["--no-index", "--find-links=."]
        steps = {
            f"{interpreter} cannot create a venv": [interpreter, "-I", "-m", "venv", str(venv)],
            # Before Python 3.12 each venv contains setuptools; only the requirements should determine whether it is installed.
            "pip cannot remove setuptools": [*pip, "uninstall", "--yes", "setuptools"],
            "pip cannot install the requirements": [*pip, "install", "--no-deps", *index_options, "--requirement=list.txt"],
            "the requirements lack a dependency (pip check)": [*pip, "check"],
        }
        try:
            for error, argv in steps.items():
                code, output = _run_build_step(argv, wheels, is_caller_gone)
                if code:
                    return {"error": error, "output": output}
            link = self._build_folder / "link"
            link.symlink_to(self._get_link_target(key))
            link.replace(self.path)
            active_key = key
            return {}
        finally:
            self._remove_build_files_except({active_key, "lock"})

    def _get_link_target(self, key: str) -> Path:
        return Path(self._build_folder.name) / key

    def _remove_build_files_except(self, kept_names: set[str]) -> None:
        for path in self._build_folder.iterdir():
            if path.name not in kept_names:
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path, ignore_errors=True)


def get_build_folder(venv_path: Path) -> Path:
    """Return the folder in which the venv at `venv_path` is built."""
    return venv_path.with_name(f"{venv_path.name}.made")


def _run_build_step(argv: list[str], cwd: Path, is_caller_gone: Callable[[], bool]) -> tuple[int, str]:
    """Run one build step, and return its exit code and last output lines. If the caller is gone, all started processes are killed."""
    log = cwd / "log"
    with log.open("wb") as output:
        child = start_process(argv, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, new_session=True, die_with_parent=True)
    while child.poll() is None:
        if is_caller_gone():
            os.killpg(child.pid, 9)
            child.wait()
            return 130, "interrupted"
        time.sleep(_POLL_SECONDS)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return child.returncode, "\n".join(lines[-_OUTPUT_TAIL_LINES:])
