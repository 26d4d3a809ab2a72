"""Describe this machine for the benchmark results: cores, processor and memory, without the host name."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def describe_machine() -> str:
    """Return a description of this machine, such as `2 cores of Intel(R) Xeon(R) Processor, 24 GiB memory, Linux`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cores} core{'' if cores == 1 else 's'} of {_get_processor_name()}, {memory:.0f} GiB memory, {platform.system()}"


def _get_processor_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return " ".join(match[1].split()) if match else platform.machine()


def get_available_memory() -> int:
    """Return the bytes of memory that programs can use, including what the page cache would give up."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def has_bfloat16() -> bool:
    """Return whether the processor supports bfloat16 instructions; without them, bfloat16 takes several times as long as float32."""
    try:
        return (
            re.search(r"^(flags|Features)\b.*\b(avx512_bf16|amx_bf16|bf16)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None
        )
    except OSError:
        return False
