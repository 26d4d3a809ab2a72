"""However a model is split into pipeline stages, the run equals that of one process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import (
    LocalWorld,
    compute_deviation,
    list_saved_steps,
    merge_config,
    read_audit,
    read_gradient_norms,
    read_losses,
    read_manifest,
    read_validation_losses,
    run_training,
)

from swarmtrain.protocol import EXIT_PLANNED

UNTIED = {"num_layers": 4, "mlp_type": "swiglu", "norm_type": "rms", "attention_num_kv_heads": 2, "weight_tying": False}
GROUPS = [
    {"group_name": "head", "parameters_include": ["head"], "weight_decay": 0.0},
    {"group_name": "rest", "parameters_exclude": ["head"], "weight_decay": 0.1},
]
"""The first stage has no parameter of the first group."""

TrainSingleRank = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def tied_config(config: dict[str, Any]) -> dict[str, Any]:
    return merge_config(config, transformer_architecture={"num_layers": 4, "dropout_embedding": 0.1, "dropout_after_mlp": 0.1})


@pytest.fixture(scope="module")
def untied_config(config: dict[str, Any]) -> dict[str, Any]:
    return {**merge_config(config, transformer_architecture=UNTIED), "training_groups": GROUPS}


@pytest.fixture(scope="module")
def train_single_rank(tmp_path_factory: pytest.TempPathFactory) -> TrainSingleRank:
    """Return a function that trains a config in one process, only once for each config."""
    runs: dict[str, Path] = {}

    def run(config: dict[str, Any]) -> Path:
        if repr(config) not in runs:
            runs[repr(config)] = tmp_path_factory.mktemp("alone")
            run_training(runs[repr(config)], config)
        return runs[repr(config)]

    return run


def assert_alike(actual: Path, expected: Path) -> None:
    assert compute_deviation(read_losses(actual), read_losses(expected)) < 1e-6
    assert compute_deviation(read_validation_losses(actual), read_validation_losses(expected)) < 1e-6
    first, second = read_gradient_norms(actual)[1], read_gradient_norms(expected)[1]
    assert abs(first - second) < 1e-6 * first, "AdamW and clipping would hide a factor"


@pytest.mark.parametrize(
    ("topology", "size"),
    [
        ({"pipe_parallel_size": 2, "pipe_stages_per_rank": 2}, 2),
        ({"pipe_parallel_size": 3, "pipe_partition_method": "balanced"}, 6),
        ({"pipe_parallel_size": 2, "pipe_partition_overwrite": [0, 3]}, 6),
    ],
    ids=["interleaved", "balanced, two replicas", "explicit, three replicas"],
)
def test_tied(tmp_path: Path, tied_config: dict[str, Any], train_single_rank: TrainSingleRank, topology: dict[str, Any], size: int) -> None:
    """The replica check compares the two copies of the tied weight too, bit by bit."""
    run_training(tmp_path, merge_config(tied_config, topology=topology, trainer={"check_replicas_interval": 4}), size)
    assert_alike(train_single_rank(tied_config), tmp_path)


def test_untied_and_groups_that_a_stage_has_nothing_of(
    tmp_path: Path, untied_config: dict[str, Any], train_single_rank: TrainSingleRank
) -> None:
    """Without a tied weight no sum has another order: not a bit differs."""
    run_training(tmp_path, merge_config(untied_config, topology={"pipe_parallel_size": 2, "pipe_stages_per_rank": 2}), 4)
    assert read_losses(tmp_path) == read_losses(train_single_rank(untied_config))
    assert read_validation_losses(tmp_path) == read_validation_losses(train_single_rank(untied_config))


def test_a_replica_without_a_micro_batch(tmp_path: Path, tied_config: dict[str, Any], train_single_rank: TrainSingleRank) -> None:
    """In float64: in float32, a difference in the last bit grows to 3e-6 within 12 steps."""
    small = merge_config(tied_config, topology={"global_batch_size": 4}, transformer_architecture={"precision": "float64"})
    run_training(tmp_path, merge_config(small, topology={"pipe_parallel_size": 2}), 6)
    assert_alike(train_single_rank(small), tmp_path)
    by_rank = {line["rank"]: len(line["samples"]) for line in read_audit(tmp_path)}
    assert [by_rank[rank] for rank in range(6)] == [2, 2, 0, 2, 2, 0]


def test_with_tensor_parallel_and_resumed_in_another_topology(
    tmp_path: Path, tied_config: dict[str, Any], train_single_rank: TrainSingleRank
) -> None:
    """Four steps each: by tensor-parallel pipeline stages, by one process, and by two replicas of a pipeline."""
    saving = merge_config(tied_config, trainer={"keep_checkpoints": 3})
    worlds = [
        ({"pipe_parallel_size": 2, "model_parallel_size": 2, "pipe_stages_per_rank": 2}, 4),
        ({}, 1),
        ({"pipe_parallel_size": 2}, 4),
    ]
    for last, (topology, size) in zip((4, 8, 12), worlds, strict=True):
        run_training(tmp_path, merge_config(saving, topology=topology, trainer={"train_iterations": last}), size)
    assert compute_deviation(read_losses(train_single_rank(tied_config)), read_losses(tmp_path)) < 1e-6
    assert list_saved_steps(tmp_path) == [4, 8, 12]
    names, *others = (set(read_manifest(tmp_path, step)["tensors"]) for step in (8, 4, 12))
    assert others == [names, names]
    assert "model/embedding.weight" in names
    assert "model/head.weight" not in names
    sizes = [sum(file["size"] for file in read_manifest(tmp_path, step)["files"].values()) for step in (4, 8, 12)]
    assert sizes[0] == sizes[1] == sizes[2], "the tied weight is saved once"


def test_stopped_and_resumed_bit_for_bit(tmp_path: Path, untied_config: dict[str, Any]) -> None:
    piped = merge_config(untied_config, topology={"pipe_parallel_size": 2}, trainer={"train_iterations": 24})
    run_training(tmp_path / "once", piped, 2)
    world = LocalWorld(tmp_path / "twice", piped, 2)
    world.wait_until(lambda: len(read_audit(tmp_path / "twice")) > 5)
    world.send_signal(1, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.read_log()
    assert list_saved_steps(tmp_path / "twice")[-1] < 24
    assert run_training(tmp_path / "twice", piped, 2) == read_losses(tmp_path / "once")
    assert read_manifest(tmp_path / "twice", 24)["files"] == read_manifest(tmp_path / "once", 24)["files"]


def test_sharded_sequences_in_float64(tmp_path: Path, tied_config: dict[str, Any], train_single_rank: TrainSingleRank) -> None:
    """Tensor- and sequence-parallel stages, interleaved."""
    exact = merge_config(tied_config, transformer_architecture={"precision": "float64"}, trainer={"train_iterations": 3})
    topology = {"pipe_parallel_size": 2, "pipe_stages_per_rank": 2, "model_parallel_size": 2, "sequence_parallel": True}
    run_training(tmp_path, merge_config(exact, topology=topology), 4)
    assert compute_deviation(read_losses(train_single_rank(exact)), read_losses(tmp_path)) < 1e-12
