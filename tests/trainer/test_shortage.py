"""Out of memory: one error of ours, on the rank that it befell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import shortage


@pytest.mark.parametrize("place", ["model"])
def test_a_rank_without_room_says_what_to_change(place: str, config: Mapping[str, Any], tmp_path: Path) -> None:
    shape = {"mlp_factor": 4000.0} if place == "model" else {"sequence_length": 512, "mlp_factor": 64.0}
    world = worlds.World(tmp_path, worlds.changed(config, transformer_architecture=shape), 1, {"SHORT": place}, script="short")
    assert world.wait() == [1], world.log()
    told = world.log().rpartition("TrainingError: ")[2]  # a rank of this pool shows all exceptions; the script's own shows ours alone
    begins = r"step \d on rank 0" if place == "step" else "rank 0"
    assert re.match(f"{begins}: can't allocate memory: ", told), world.log()
    assert ("MiB of optimizer state" in told) == (place == "step"), told


def test_a_gpu_without_room_is_told_alike() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1 GiB is free. Process 1 …"
    with (
        pytest.raises(TrainingError, match=r"CUDA out of memory. Tried to allocate 2.00 GiB; there were 4.0 MiB of parameters") as told,
        shortage.told("step 1 on rank 0", lambda: {"parameters": [torch.zeros(2**20), None]}),
    ):
        raise torch.OutOfMemoryError(text)
    assert told.value.place == "step 1 on rank 0"
    with pytest.raises(RuntimeError, match="something else"), shortage.told("here"):
        raise RuntimeError("something else")
