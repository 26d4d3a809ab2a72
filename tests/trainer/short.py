"""training_code.py with so little room that its first step, or its model, finds no memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import training_code
from swarmtrain.trainer import loop, step


def main() -> None:
    made = step.make_step

    def starved(*args: object, **options: object) -> step.Step:
        if options["number"] == 1:
            _starve()
        return made(*args, **options)  # type: ignore[arg-type]

    if os.environ["SHORT"] == "step":
        loop.make_step = starved
    else:
        _starve()
    training_code.main()


def _starve() -> None:
    """Leave 2 GiB of address space: enough for all small things, stacks of threads and pools of allocators among them."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31,) * 2)
