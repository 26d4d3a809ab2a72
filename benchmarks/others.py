"""Other people's programs, each in a virtual environment of its own under build/bench/, with a home folder that is not the user's."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import BUILD, Unavailable, say
from swarmtrain import process
from swarmtrain.errors import ProcessError

# What the figures of docs/reference/speed.md were taken with.
TORCHX = "torchx==0.7.0"
DSTACK = "dstack==0.22.5"
SKYPILOT = "skypilot==0.14.1"
TRANSFORMERS = "transformers==5.23.0"
ACCELERATE = "accelerate==1.15.0"
NANOGPT = "https://github.com/karpathy/nanoGPT"


def install(requirement: str, program: str) -> Path:
    """Return the path of `program`, which `requirement` brings. Raises Unavailable if it cannot be installed."""
    return _made([requirement]) / "bin" / program


def beside_torch(*requirements: str) -> Path:
    """Return a Python that has `requirements`, and what is installed here, torch above all. Raises Unavailable if it cannot be made."""
    return _made(requirements, shared=True) / "bin" / "python"


def clone(address: str) -> Path:
    """Return the folder of a clone of the repository at `address`; one that is there is taken. Raises Unavailable."""
    folder = BUILD / address.rpartition("/")[2]
    if not folder.exists():
        say(f"cloning {address}")
        try:
            process.run(["git", "clone", "--quiet", "--depth", "1", address, str(folder)], env={"GIT_TERMINAL_PROMPT": "0"})
        except ProcessError as error:
            raise Unavailable(f"{address} cannot be cloned: {_last(error)}", hint=f"git clone {address} {folder}") from None
    return folder


def environment() -> Mapping[str, str]:
    """Return what keeps these programs from writing into the user's home, and from telling their makers that they ran."""
    home = BUILD / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "DSTACK_TELEMETRY": "0"}


def _made(requirements: Sequence[str], *, shared: bool = False) -> Path:
    folder = BUILD / requirements[0].replace("==", "-")
    if not (folder / ".complete").exists():
        say(f"installing {' '.join(requirements)}")
        try:
            process.run([sys.executable, "-m", "venv", "--clear", str(folder)])
            if shared:
                [packages] = folder.glob("lib/python*/site-packages")
                (packages / "shared.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
            process.run([str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *requirements])
        except ProcessError as error:
            raise Unavailable(f"{requirements[0]} cannot be installed: {_last(error)}") from None
        (folder / ".complete").touch()
    return folder


def _last(error: ProcessError) -> str:
    return (error.output.strip().splitlines() or [error.message])[-1]
