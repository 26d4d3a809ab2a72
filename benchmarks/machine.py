"""The machine that figures come from, in words that name nobody's: cores, processor, memory."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def describe() -> str:
    """Return for instance `2 cores of Intel(R) Xeon(R) Processor, 24 GiB memory, Linux`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cores} core{'' if cores == 1 else 's'} of {_processor()}, {memory:.0f} GiB memory, {platform.system()}"


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.machine()


def has_bfloat16() -> bool:
    """Say whether the processor multiplies bfloat16; one that does not takes several times as long for it as for float32."""
    try:
        return (
            re.search(r"^(flags|Features)\b.*\b(avx512_bf16|amx_bf16|bf16)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None
        )
    except OSError:
        return False
