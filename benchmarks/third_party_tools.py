"""Third-party programs, each in its own virtual environment under build/bench/, with a home directory that is not the user's."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measurement import BUILD, BenchmarkUnavailableError, print_progress
from swarmtrain import process
from swarmtrain.errors import ProcessError

# The versions behind the figures in docs/reference/speed.md.
TORCHX = "torchx==0.7.0"
DSTACK = "dstack==0.22.5"
SKYPILOT = "skypilot==0.14.1"
TRANSFORMERS = "transformers==5.23.0"
ACCELERATE = "accelerate==1.15.0"
NANOGPT = "https://github.com/karpathy/nanoGPT"


def install_program(requirement: str, program: str) -> Path:
    """Return the path of `program`, which `requirement` installs. Raises BenchmarkUnavailableError if it cannot be installed."""
    return _create_environment([requirement]) / "bin" / program


def install_beside_torch(*requirements: str) -> Path:
    """Return a Python that has `requirements` and the packages installed here, above all torch.

    Raises BenchmarkUnavailableError if it cannot be created.
    """
    return _create_environment(requirements, shares_packages=True) / "bin" / "python"


def clone_repository(address: str) -> Path:
    """Return the folder of a clone of the repository at `address`; an existing one is reused. Raises BenchmarkUnavailableError."""
    folder = BUILD / address.rpartition("/")[2]
    if not folder.exists():
        print_progress(f"cloning {address}")
        try:
            process.run_command(["git", "clone", "--quiet", "--depth", "1", address, str(folder)], env={"GIT_TERMINAL_PROMPT": "0"})
        except ProcessError as error:
            raise BenchmarkUnavailableError(
                f"{address} cannot be cloned: {_get_last_line(error)}", hint=f"git clone {address} {folder}"
            ) from None
    return folder


def build_environment() -> Mapping[str, str]:
    """Return the variables that keep these programs from writing to the user's home, and from sending telemetry."""
    home = BUILD / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "DSTACK_TELEMETRY": "0"}


def _create_environment(requirements: Sequence[str], *, shares_packages: bool = False) -> Path:
    folder = BUILD / requirements[0].replace("==", "-")
    if not (folder / ".complete").exists():
        print_progress(f"installing {' '.join(requirements)}")
        try:
            process.run_command([sys.executable, "-m", "venv", "--clear", str(folder)])
            if shares_packages:
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
