"""However a batch is divided over ranks, the run is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import World, changed, deviation, held_out, losses, manifest, samples_by_step, train

SWIGLU = {"mlp_type": "swiglu", "norm_type": "rms", "attention_num_kv_heads": 2, "weight_tying": False}


def test_tensor_parallel_replicas_equal_one_process(tmp_path: Path, config: dict[str, Any]) -> None:
    """With two micro batches each; test_topologies.py has a model of the other kind, and other replicas."""
    base = changed(config, transformer_architecture=SWIGLU, topology={"micro_batch_size": 3})
    one = train(tmp_path / "one", base)
    divided = train(tmp_path / "divided", changed(base, topology={"model_parallel_size": 2}), 4)
    assert len(one) == 12
    assert deviation(one, divided) < 1e-6
    assert deviation(held_out(tmp_path / "one"), held_out(tmp_path / "divided")) < 1e-6
    assert one[12] < 0.9 * one[1], "a model that learns nothing is equal to anything"


@pytest.mark.parametrize(("size", "batch"), [(3, 10), (3, 4), (5, 12)], ids=["uneven", "one rank idle", "five"])
def test_replicas_are_one_process_bit_for_bit(tmp_path: Path, config: dict[str, Any], size: int, batch: int) -> None:
    base = changed(config, topology={"global_batch_size": batch}, trainer={"train_iterations": 60, "eval_interval": 20})
    one = train(tmp_path / "one", base)
    uneven = train(tmp_path / "uneven", base, size)
    assert one == uneven
    assert held_out(tmp_path / "one") == held_out(tmp_path / "uneven")
    assert samples_by_step(tmp_path / "one") == samples_by_step(tmp_path / "uneven")


def test_accumulation_equals_one_big_batch(tmp_path: Path, config: dict[str, Any]) -> None:
    small = train(tmp_path / "small", config)
    big = train(tmp_path / "big", changed(config, topology={"micro_batch_size": 12}))
    assert deviation(small, big) < 1e-6


def test_the_seed_matters(tmp_path: Path, config: dict[str, Any]) -> None:
    """The measure of the tests above: another seed is another run."""
    one = train(tmp_path / "one", config)
    other = train(tmp_path / "other", changed(config, trainer={"seed": 43}))
    assert deviation(one, other) > 1e-3


def test_bfloat16_trains_alike(tmp_path: Path, config: dict[str, Any]) -> None:
    exact = train(tmp_path / "exact", config)
    coarse = train(tmp_path / "coarse", changed(config, transformer_architecture={"precision": "bfloat16"}), 2)
    assert 1e-6 < deviation(exact, coarse) < 0.05


def test_a_world_that_fits_no_replica_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    from worlds import World

    world = World(tmp_path, changed(config, topology={"model_parallel_size": 2}), 3)
    assert world.wait() == [1, 1, 1]
    assert "no multiple of model_parallel_size" in world.log()


def test_a_feed_forward_block_of_ones_own(tmp_path: Path, config: dict[str, Any]) -> None:
    """It is drawn, divided and saved like any other; tensor parallelism leaves it whole on each rank."""
    base = changed(config, trainer={"train_iterations": 4})
    one = tmp_path / "one"
    for name, size, topology in (("one", 1, {}), ("fsdp", 2, {"data_parallel_type": "fsdp"}), ("tensor", 2, {"model_parallel_size": 2})):
        world = World(tmp_path / name, changed(base, topology=topology), size, script="mixture")
        assert world.wait() == [0] * size, world.log()
        assert deviation(losses(one), losses(tmp_path / name)) < 1e-6, name
    assert "model/blocks.0.mlp.experts" in manifest(one, 4)["tensors"]
    assert losses(one)[4] < losses(one)[1]
