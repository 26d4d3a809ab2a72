"""training_code.py with so little memory that its first step, or its model, cannot be allocated."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import training_code
from swarmtrain.trainer import Run
from swarmtrain.trainer.data.samples import GlobalBatch


def main() -> None:
    forward_backward = Run.forward_backward

    def run_without_memory(run: Run, batch: GlobalBatch) -> Any:
        if run.step == 0:
            _limit_address_space()
        return forward_backward(run, batch)

    if os.environ["LOW_MEMORY_AT"] == "step":
        Run.forward_backward = run_without_memory  # type: ignore[method-assign]
    else:
        _limit_address_space()
    training_code.main()


def _limit_address_space() -> None:
    """Leave 2 GiB of address space: enough for small allocations, including thread stacks and allocator pools."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31,) * 2)
