"""training_code.py with so little memory that its first step, or its model, cannot be allocated."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import training_code
from swarmtrain.trainer import loop, step


def main() -> None:
    original_train_step = step.train_step

    def train_step_without_memory(*args: Any) -> step.StepResult:
        if args[-1].number == 1:
            _limit_address_space()
        return original_train_step(*args)

    if os.environ["LOW_MEMORY_AT"] == "step":
        loop.train_step = train_step_without_memory
    else:
        _limit_address_space()
    training_code.main()


def _limit_address_space() -> None:
    """Leave 2 GiB of address space: enough for small allocations, including thread stacks and allocator pools."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31,) * 2)
