"""Out of memory: one TrainingError, on the rank that runs out."""

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
from swarmtrain.trainer import out_of_memory


@pytest.mark.parametrize(
    ("allocation", "shape"),
    [
        ("model", {"mlp_factor": 2.0**20}),  # 32 x 32 x 2^20 weights
        ("step", {"sequence_length": 2**12, "mlp_factor": 2.0**12}),  # 2 x 2^12 tokens x 32 x 2^12, with 16 MiB of weights
    ],
)
def test_a_rank_without_memory_prints_what_to_change(
    allocation: str, shape: dict[str, Any], config: Mapping[str, Any], tmp_path: Path
) -> None:
    """One request is twice the available memory, and all earlier ones are a small part of it: so it is always this one that fails."""
    base = worlds.merge_config(config, transformer_architecture={**shape, "num_layers": 1}, data={"validation_data_prefixes": []})
    world = worlds.LocalWorld(tmp_path, base, 1, {"LOW_MEMORY_AT": allocation}, script="low_memory")
    assert world.wait() == [1], world.read_log()
    message = world.read_log().rpartition("TrainingError: ")[2]  # a rank of this pool prints all exceptions; the script only ours
    begins = "step 1 on rank 0" if allocation == "step" else "rank 0"
    assert re.match(f"{begins}: can't allocate memory: 4.0 GiB more were requested", message), world.read_log()
    assert ("MiB of optimizer state" in message) == (allocation == "step"), message


def test_a_gpu_without_memory_and_numpy_are_reported_alike() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1 GiB is free. Process 1 …"
    with (
        pytest.raises(TrainingError, match=r"CUDA out of memory. Tried to allocate 2.00 GiB; allocated: 4.0 MiB of parameters") as raised,
        out_of_memory.explain_out_of_memory_error("step 1 on rank 0", lambda: {"parameters": [torch.zeros(2**20), None]}),
    ):
        raise torch.OutOfMemoryError(text)
    assert raised.value.place == "step 1 on rank 0"
    with pytest.raises(TrainingError, match=r"here: Unable to allocate 4\.00 EiB"), out_of_memory.explain_out_of_memory_error("here"):
        np.empty(2**59)
    with pytest.raises(RuntimeError, match="something else"), out_of_memory.explain_out_of_memory_error("here"):
        raise RuntimeError("something else")
