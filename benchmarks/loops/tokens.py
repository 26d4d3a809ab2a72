"""Token data of all loops: a file of 16-bit tokens, read in windows of one sample plus the next token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def open_windows(prefix: Path, length: int) -> npt.NDArray[Any]:
    """Return the windows of the token file at `prefix` (see swarmtrain.trainer.data.memory_map), one per row, memory-mapped."""
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
