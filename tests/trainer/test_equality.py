"""The run is the same however a batch is divided over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import (
    LocalWorld,
    compute_deviation,
    merge_config,
    read_losses,
    read_manifest,
    read_samples_by_step,
    read_validation_losses,
    run_training,
)

SWIGLU = {"mlp_type": "swiglu", "norm_type": "rms", "attention_num_kv_heads": 2, "weight_tying": False}


@pytest.mark.parametrize("activation_checkpointing", ["disabled", "selective"])
def test_tensor_parallel_replicas_equal_one_process(tmp_path: Path, config: dict[str, Any], activation_checkpointing: str) -> None:
    """With two micro batches per replica; test_topologies.py has a model of the other kind, and other replicas."""
    base = merge_config(config, transformer_architecture=SWIGLU, topology={"micro_batch_size": 3})
    one = run_training(tmp_path / "one", base)
    topology = {"model_parallel_size": 2, "activation_checkpointing_type": activation_checkpointing}
    divided = run_training(tmp_path / "divided", merge_config(base, topology=topology), 4)
    assert len(one) == 12
    assert compute_deviation(one, divided) < 1e-6
    assert compute_deviation(read_validation_losses(tmp_path / "one"), read_validation_losses(tmp_path / "divided")) < 1e-6
    assert one[12] < 0.9 * one[1], "a model that learns nothing is equal to anything"


@pytest.mark.parametrize(("size", "batch"), [(3, 10), (3, 4), (5, 12)], ids=["uneven", "one rank idle", "five"])
def test_replicas_are_one_process_bit_for_bit(tmp_path: Path, config: dict[str, Any], size: int, batch: int) -> None:
    base = merge_config(config, topology={"global_batch_size": batch}, trainer={"train_iterations": 60, "eval_interval": 20})
    one = run_training(tmp_path / "one", base)
    uneven = run_training(tmp_path / "uneven", base, size)
    assert one == uneven
    assert read_validation_losses(tmp_path / "one") == read_validation_losses(tmp_path / "uneven")
    assert read_samples_by_step(tmp_path / "one") == read_samples_by_step(tmp_path / "uneven")


def test_accumulation_equals_one_big_batch(tmp_path: Path, config: dict[str, Any]) -> None:
    small = run_training(tmp_path / "small", config)
    big = run_training(tmp_path / "big", merge_config(config, topology={"micro_batch_size": 12}))
    assert compute_deviation(small, big) < 1e-6


def test_another_seed_is_another_run(tmp_path: Path, config: dict[str, Any]) -> None:
    """The yardstick for the tests above: another seed gives other losses."""
    one = run_training(tmp_path / "one", config)
    other = run_training(tmp_path / "other", merge_config(config, trainer={"seed": 43}))
    assert compute_deviation(one, other) > 1e-3


def test_a_world_that_fits_no_replica_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    from worlds import LocalWorld

    world = LocalWorld(tmp_path, merge_config(config, topology={"model_parallel_size": 2}), 3)
    assert world.wait() == [1, 1, 1]
    assert "not a multiple of model_parallel_size" in world.read_log()


def test_a_custom_feed_forward_block(tmp_path: Path, config: dict[str, Any]) -> None:
    """It is initialized, sharded and saved like any other; tensor parallelism leaves it unsharded on each rank."""
    base = merge_config(config, trainer={"train_iterations": 4})
    one = tmp_path / "one"
    topologies: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "fsdp": (2, {"data_parallel_type": "fsdp"}),
        "tensor": (2, {"model_parallel_size": 2}),
        "sequence": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    }
    for name, (size, topology) in topologies.items():
        world = LocalWorld(tmp_path / name, merge_config(base, topology=topology), size, script="mixture_of_experts")
        assert world.wait() == [0] * size, world.read_log()
        assert compute_deviation(read_losses(one), read_losses(tmp_path / name)) < 1e-6, name
    assert "model/blocks.0.mlp.experts" in read_manifest(one, 4)["tensors"]
    assert read_losses(one)[4] < read_losses(one)[1]
