"""Out of memory: one error of ours, on the rank that it befell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import shortage


@pytest.mark.parametrize(
    ("place", "shape"),
    [
        ("model", {"mlp_factor": 2.0**20}),  # 32 x 32 x 2^20 weights
        ("step", {"sequence_length": 2**12, "mlp_factor": 2.0**12}),  # 2 x 2^12 tokens x 32 x 2^12, of weights that are 16 MiB
    ],
)
def test_a_rank_without_room_says_what_to_change(place: str, shape: dict[str, Any], config: Mapping[str, Any], tmp_path: Path) -> None:
    """One request is twice what there is room for, and all before it a small part of that: so it is always that one which fails."""
    base = worlds.changed(config, transformer_architecture={**shape, "num_layers": 1}, data={"validation_data_prefixes": []})
    world = worlds.World(tmp_path, base, 1, {"SHORT": place}, script="short")
    assert world.wait() == [1], world.log()
    told = world.log().rpartition("TrainingError: ")[2]  # a rank of this pool shows all exceptions; the script's own shows ours alone
    begins = "step 1 on rank 0" if place == "step" else "rank 0"
    assert re.match(f"{begins}: can't allocate memory: 4.0 GiB more were wanted", told), world.log()
    assert ("MiB of optimizer state" in told) == (place == "step"), told


def test_a_gpu_without_room_and_numpy_are_told_alike() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1 GiB is free. Process 1 …"
    with (
        pytest.raises(TrainingError, match=r"CUDA out of memory. Tried to allocate 2.00 GiB; there were 4.0 MiB of parameters") as told,
        shortage.told("step 1 on rank 0", lambda: {"parameters": [torch.zeros(2**20), None]}),
    ):
        raise torch.OutOfMemoryError(text)
    assert told.value.place == "step 1 on rank 0"
    with pytest.raises(TrainingError, match=r"here: Unable to allocate 4\.00 EiB"), shortage.told("here"):
        np.empty(2**59)
    with pytest.raises(RuntimeError, match="something else"), shortage.told("here"):
        raise RuntimeError("something else")
