"""Install third-party programs under build/bench/, each in a separate virtual environment, with a separate home directory.

Also extract earlier versions of this repository there.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measurement import BUILD, ROOT, BenchmarkUnavailableError, print_progress
from swarmtrain import process
from swarmtrain.errors import ProcessError

# The versions that docs/reference/speed.md reports on.
TORCHX = "torchx==0.7.0"
DSTACK = "dstack==0.22.5"
SKYPILOT = "skypilot==0.14.1"
TRANSFORMERS = "transformers==5.23.0"
ACCELERATE = "accelerate==1.15.0"
TORCHTITAN = "torchtitan==0.3.0"
TRITON = "triton==3.9.0"
"""torchtitan's model imports it; torch for CPUs is installed without it."""
MATPLOTLIB = "matplotlib==3.11.2"
NANOGPT = "https://github.com/karpathy/nanoGPT"


def install_program(requirement: str, program: str) -> Path:
    """Install `requirement` and return the path of its `program`. Raises BenchmarkUnavailableError if the installation fails."""
    return _create_virtual_environment([requirement]) / "bin" / program


def install_with_shared_packages(*requirements: str) -> Path:
    """Install `requirements` in a virtual environment that includes this environment's packages. Return its Python interpreter.

    Raises BenchmarkUnavailableError if the installation fails.
    """
    return _create_virtual_environment(requirements, system_site_packages=True) / "bin" / "python"


def clone_repository(url: str) -> Path:
    """Clone the repository at `url`, unless a clone exists, and return its folder. Raises BenchmarkUnavailableError if the clone fails."""
    folder = BUILD / url.rpartition("/")[2]
    if not folder.exists():
        print_progress(f"cloning {url}")
        try:
            process.run_command(["git", "clone", "--quiet", "--depth", "1", url, str(folder)], env={"GIT_TERMINAL_PROMPT": "0"})
        except ProcessError as error:
            raise BenchmarkUnavailableError(
                f"{url} cannot be cloned: {_get_last_line(error)}", hint=f"run git clone {url} {folder}"
            ) from None
    return folder


def check_out_commit(commit: str) -> Path:
    """Extract this repository at `commit`, unless that exists, and return its folder. Raises BenchmarkUnavailableError."""
    folder = BUILD / f"commit-{commit}"
    if not folder.exists():
        archive = folder.with_suffix(".tar")
        BUILD.mkdir(parents=True, exist_ok=True)
        try:
            process.run_command(["git", "archive", "--output", str(archive), commit], cwd=ROOT)
        except ProcessError as error:
            hint = "git fetch --unshallow"
            raise BenchmarkUnavailableError(f"commit {commit} is not available: {_get_last_line(error)}", hint=hint) from None
        shutil.unpack_archive(archive, folder, filter="data")
        archive.unlink()
    return folder


def build_environment() -> Mapping[str, str]:
    """Return environment variables that prevent the programs from writing to the user's home, and from sending telemetry."""
    home = BUILD / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "DSTACK_TELEMETRY": "0"}


def _create_virtual_environment(requirements: Sequence[str], *, system_site_packages: bool = False) -> Path:
    folder = BUILD / requirements[0].replace("==", "-")
    if not (folder / ".complete").exists():
        print_progress(f"installing {' '.join(requirements)}")
        try:
            process.run_command([sys.executable, "-m", "venv", "--clear", str(folder)])
            if system_site_packages:
                [packages] = folder.glob("lib/python*/site-packages")
                (packages / "shared.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
            process.run_command(
                [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *requirements]
            )
        except ProcessError as error:
            raise BenchmarkUnavailableError(f"{requirements[0]} cannot be installed: {_get_last_line(error)}") from None
        (folder / ".complete").touch()
    return folder


def _get_last_line(error: ProcessError) -> str:
    return (error.output.strip().splitlines() or [error.message])[-1]
