"""Memory that this rank uses now: what its device and the machine say, at the cost of a call, without waiting for the device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
_RESIDENT = 1


def used_memory(device: torch.device) -> dict[str, int]:
    """Return bytes: host, what the process has in memory, and of a GPU allocated, reserved, peak (most allocated so far), total."""
    found = {"host": int(Path("/proc/self/statm").read_text().split()[_RESIDENT]) * _PAGE}
    if device.type != "cuda":
        return found
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
        "total": torch.cuda.get_device_properties(device).total_memory,
        **found,
    }
