"""The tokens that all loops read: a file of 16-bit numbers, in windows of a sample and the token after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def windows(prefix: Path, length: int) -> npt.NDArray[Any]:
    """Return the windows of the file of `prefix` (see swarmtrain.trainer.data.memory_map), a row each, unread until used."""
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
