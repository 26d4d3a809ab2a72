"""Other people's programs, each in a virtual environment of its own under build/bench/, with a home folder that is not the user's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.measure import BUILD, Unavailable, say
from swarmtrain import process
from swarmtrain.errors import ProcessError

# What the figures of docs/reference/speed.md were taken with.
TORCHX = "torchx==0.7.0"
DSTACK = "dstack==0.22.5"
SKYPILOT = "skypilot==0.14.1"


def install(requirement: str, program: str) -> Path:
    """Return the path of `program`, which `requirement` brings. Raises Unavailable if it cannot be installed."""
    folder = BUILD / requirement.replace("==", "-")
    found = folder / "bin" / program
    if not (folder / ".complete").exists():
        say(f"installing {requirement}")
        try:
            process.run([sys.executable, "-m", "venv", "--clear", str(folder)])
            process.run([str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", requirement])
        except ProcessError as error:
            reason = error.output.strip().splitlines() or [error.message]
            raise Unavailable(f"{requirement} cannot be installed: {reason[-1]}") from None
        (folder / ".complete").touch()
    return found


def environment() -> Mapping[str, str]:
    """Return what keeps these programs from writing into the user's home, and from telling their makers that they ran."""
    home = BUILD / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "DSTACK_TELEMETRY": "0"}
