"""However a model is cut into stages, the run is that of one process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import World, audit, changed, deviation, gradient_norms, held_out, losses, manifest, steps_saved, train

from swarmtrain.wire import EXIT_PLANNED

UNTIED = {"num_layers": 4, "mlp_type": "swiglu", "norm_type": "rms", "attention_num_kv_heads": 2, "weight_tying": False}
GROUPS = [
    {"group_name": "head", "parameters_include": ["head"], "weight_decay": 0.0},
    {"group_name": "rest", "parameters_exclude": ["head"], "weight_decay": 0.1},
]
"""Of the first group the first stage has nothing."""

Alone = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def tied(config: dict[str, Any]) -> dict[str, Any]:
    return changed(config, transformer_architecture={"num_layers": 4, "dropout_embedding": 0.1, "dropout_after_mlp": 0.1})


@pytest.fixture(scope="module")
def untied(config: dict[str, Any]) -> dict[str, Any]:
    return {**changed(config, transformer_architecture=UNTIED), "training_groups": GROUPS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Runs of one process, each made once."""
    made: dict[str, Path] = {}

    def run(config: dict[str, Any]) -> Path:
        if repr(config) not in made:
            made[repr(config)] = tmp_path_factory.mktemp("alone")
            train(made[repr(config)], config)
        return made[repr(config)]

    return run


def assert_alike(one: Path, other: Path) -> None:
    assert deviation(losses(one), losses(other)) < 1e-6
    assert deviation(held_out(one), held_out(other)) < 1e-6
    first, same = gradient_norms(one)[1], gradient_norms(other)[1]
    assert abs(first - same) < 1e-6 * first, "AdamW and clipping would hide a factor"


@pytest.mark.parametrize(
    ("topology", "size"),
    [
        ({"pipe_parallel_size": 2, "pipe_stages_per_rank": 2}, 2),
        ({"pipe_parallel_size": 3, "pipe_partition_method": "balanced"}, 6),
        ({"pipe_parallel_size": 2, "pipe_partition_overwrite": [0, 3]}, 6),
    ],
    ids=["interleaved", "balanced, two replicas", "explicit, three replicas"],
)
def test_tied(tmp_path: Path, tied: dict[str, Any], alone: Alone, topology: dict[str, Any], size: int) -> None:
    """The two copies of the tied weight are among what is compared bit by bit."""
    train(tmp_path, changed(tied, topology=topology, trainer={"check_replicas_interval": 4}), size)
    assert_alike(alone(tied), tmp_path)


def test_untied_and_groups_that_a_stage_has_nothing_of(tmp_path: Path, untied: dict[str, Any], alone: Alone) -> None:
    """Without a tied weight nothing is added in another order: not a bit differs."""
    train(tmp_path, changed(untied, topology={"pipe_parallel_size": 2, "pipe_stages_per_rank": 2}), 4)
    assert losses(tmp_path) == losses(alone(untied))
    assert held_out(tmp_path) == held_out(alone(untied))


def test_a_replica_without_a_micro_batch(tmp_path: Path, tied: dict[str, Any], alone: Alone) -> None:
    small = changed(tied, topology={"global_batch_size": 4})
    train(tmp_path, changed(small, topology={"pipe_parallel_size": 2}), 6)
    assert_alike(alone(small), tmp_path)
    by_rank = {line["rank"]: len(line["samples"]) for line in audit(tmp_path)}
    assert [by_rank[rank] for rank in range(6)] == [2, 2, 0, 2, 2, 0]


def test_with_tensor_parallel_and_another_topology_takes_over(tmp_path: Path, tied: dict[str, Any], alone: Alone) -> None:
    """All of it in turn: four steps each by stages of shards, by one process, and by two replicas of a pipeline."""
    saving = changed(tied, trainer={"keep_checkpoints": 3})
    worlds = [
        ({"pipe_parallel_size": 2, "model_parallel_size": 2, "pipe_stages_per_rank": 2}, 4),
        ({}, 1),
        ({"pipe_parallel_size": 2}, 4),
    ]
    for last, (topology, size) in zip((4, 8, 12), worlds, strict=True):
        train(tmp_path, changed(saving, topology=topology, trainer={"train_iterations": last}), size)
    assert deviation(losses(alone(tied)), losses(tmp_path)) < 1e-6
    assert steps_saved(tmp_path) == [4, 8, 12]
    names, *others = (set(manifest(tmp_path, step)["tensors"]) for step in (8, 4, 12))
    assert others == [names, names]
    assert "model/embedding.weight" in names
    assert "model/head.weight" not in names
    sizes = [sum(file["size"] for file in manifest(tmp_path, step)["files"].values()) for step in (4, 8, 12)]
    assert sizes[0] == sizes[1] == sizes[2], "the tied weight is saved once"


def test_asked_to_leave_and_taken_up_bit_for_bit(tmp_path: Path, untied: dict[str, Any]) -> None:
    piped = changed(untied, topology={"pipe_parallel_size": 2}, trainer={"train_iterations": 24})
    train(tmp_path / "once", piped, 2)
    world = World(tmp_path / "twice", piped, 2)
    world.until(lambda: len(audit(tmp_path / "twice")) > 5)
    world.send(1, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.log()
    assert steps_saved(tmp_path / "twice")[-1] < 24
    assert train(tmp_path / "twice", piped, 2) == losses(tmp_path / "once")
    assert manifest(tmp_path / "twice", 24)["files"] == manifest(tmp_path / "once", 24)["files"]


def test_divided_sequences_in_float64(tmp_path: Path, tied: dict[str, Any], alone: Alone) -> None:
    """Tensor and sequence parallel stages, interleaved."""
    exact = changed(tied, transformer_architecture={"precision": "float64"}, trainer={"train_iterations": 3})
    topology = {"pipe_parallel_size": 2, "pipe_stages_per_rank": 2, "model_parallel_size": 2, "sequence_parallel": True}
    train(tmp_path, changed(exact, topology=topology), 4)
    assert deviation(losses(alone(exact)), losses(tmp_path)) < 1e-12


def test_bfloat16(tmp_path: Path, tied: dict[str, Any], alone: Alone) -> None:
    train(tmp_path, changed(tied, topology={"pipe_parallel_size": 2}, transformer_architecture={"precision": "bfloat16"}), 2)
    assert 1e-6 < deviation(losses(alone(tied)), losses(tmp_path)) < 0.05
