"""Token data of all loops: a file of 16-bit tokens, read in windows of one sample plus the next token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def open_token_windows(prefix: Path, sequence_length: int) -> npt.NDArray[Any]:
    """Return the memory-mapped windows of the token file `prefix` as a uint16 array of shape (windows, sequence_length + 1).

    The file format is that of swarmtrain.trainer.data.memory_map.
    """
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
    return np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)[::sequence_length]
