"""Memory usage of this rank, read from the device and the operating system without synchronizing with the device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RESIDENT_FIELD = 1


def read_memory_usage(device: torch.device) -> dict[str, int]:
    """Return the memory usage in bytes, by name.

    `host` is the resident set size of the process. If `device` is a GPU, the result also has `allocated`, `reserved`, `peak` (maximum of
    `allocated`) and `total`.
    """
    host_memory = {"host": int(Path("/proc/self/statm").read_text().split()[_RESIDENT_FIELD]) * _PAGE_BYTES}
    if device.type != "cuda":
        return host_memory
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
        "total": torch.cuda.get_device_properties(device).total_memory,
        **host_memory,
    }
