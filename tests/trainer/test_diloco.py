"""DiLoCo: the result depends on the number of learners, and not on the number of ranks that train them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from worlds import (
    LocalWorld,
    compute_deviation,
    list_saved_steps,
    merge_config,
    read_audit,
    read_losses,
    read_manifest,
    read_samples_by_step,
    read_validation_losses,
    run_training,
)


@pytest.fixture(scope="module")
def diloco_config(config: dict[str, Any]) -> dict[str, Any]:
    """Four learners, three rounds, and an incomplete round at the end. Dropout is on, and the gradients are clipped."""
    return merge_config(
        config,
        topology={"global_batch_size": 16, "micro_batch_size": 2, "learners": 4},
        diloco={"inner_steps": 4},
        trainer={"train_iterations": 14, "eval_interval": 2},
        transformer_architecture={"dropout_after_mlp": 0.1},
    )


def test_one_rank_equals_two_and_four(tmp_path: Path, diloco_config: dict[str, Any]) -> None:
    one = run_training(tmp_path / "1", diloco_config, 1)
    print(one, read_validation_losses(tmp_path / "1"))
