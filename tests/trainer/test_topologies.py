"""Every topology gives the same run: each resumes from the one before, and the losses do not show where."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
from worlds import LocalWorld, compute_deviation, merge_config, read_losses, read_manifest, read_validation_losses, run_training

BATCH = 16
FSDP = {"data_parallel_type": "fsdp"}
RECOMPUTED = {"activation_checkpointing_type": "every_layer"}
HSDP = {"data_parallel_type": "hsdp", "data_parallel_shard_size": 2}
REDUCED_ONCE = {"reduce_every_micro_batch": False}
TENSOR = {"model_parallel_size": 2}
PIPE = {"pipe_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}

# topology, ranks, optimizer, number of ranks that shard the embedding
TOPOLOGIES: dict[str, tuple[dict[str, Any], int, dict[str, Any], int]] = {
    "fsdp": ({**FSDP, **REDUCED_ONCE, **RECOMPUTED}, 2, {}, 2),
    "pipe x fsdp": ({**PIPE, **FSDP, "activation_checkpointing_type": "every_pipe_stage"}, 4, {}, 2),
    "tensor": (TENSOR, 2, {}, 2),
    "one": ({}, 1, {}, 1),
    "ddp": ({}, 2, {}, 1),
    "tensor x fsdp": ({**TENSOR, **FSDP, "cpu_offload": True}, 4, {}, 4),
    "tensor and sequence": ({**TENSOR, "sequence_parallel": True, "activation_checkpointing_type": "selective"}, 2, {}, 2),
    "zero": ({}, 2, {"zero": True}, 2),
    "hsdp": (HSDP, 4, {}, 2),
    "context": (CONTEXT, 2, {}, 1),
    "context x hsdp": ({**CONTEXT, **HSDP, **RECOMPUTED}, 4, {}, 2),
    "context x tensor x fsdp": ({**CONTEXT, **TENSOR, **FSDP, "sequence_parallel": True}, 4, {}, 4),
    "pipe": (PIPE, 2, {}, 1),
    "pipe x zero, interleaved": ({**PIPE, "pipe_stages_per_rank": 2, **RECOMPUTED}, 4, {"zero": True}, 2),
    "pipe x context x fsdp": ({**PIPE, **CONTEXT, **FSDP, "pipe_stages_per_rank": 2}, 4, {}, 2),
    "pipe x hsdp": ({**PIPE, **HSDP}, 8, {}, 2),
    "pipe x tensor x fsdp": ({**PIPE, **TENSOR, **FSDP}, 8, {}, 4),
}
DROPOUT = {"dropout_embedding": 0.1, "dropout_after_attention": 0.1, "dropout_after_mlp": 0.1}
DEEP = {"num_layers": 4, **DROPOUT}
GPT = {"learned_positions": True, "parallel_residual": True, "activation_function": "gelu_tanh"}
TIED = {"precision": "float32", **GPT, "attention_bias": True, "mlp_bias": True, "layernorm": {"layernorm_bias": True}, **DEEP}
UNTIED = {
    **DEEP,
    "attention_bias": True,
    "key_query_norm": True,
    "num_local_attention_heads": 2,
    "local_attention_window_size": 5,
    "local_attention_layers": [True, True, False],
    "logit_softcap": 5.0,
    "rotary_percentage": 0.5,
    "rotary_scaling": {"original_sequence_length": 16},
    "attention_head_size": 12,
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "weight_tying": False,
    "mlp_type": "swiglu",
    "norm_type": "rms",
    "attention_num_kv_heads": 2,
    "precision": "float64",
}


def _list_others(name: str) -> list[str]:
    """Return all topologies but `name`: eight ranks are a lot for two cores."""
    return [other for other in TOPOLOGIES if other != name]


@pytest.mark.parametrize(
    ("shape", "accumulation", "names"),
    [
        (TIED, 2, _list_others("pipe x tensor x fsdp")),
        pytest.param(UNTIED, 1, _list_others("pipe x hsdp")[::-1], marks=pytest.mark.test_all_only("a second chain of 16 topologies")),
    ],
    ids=["fp32, tied, accumulation 2", "fp64, untied, accumulation 1"],
)
def test_each_topology_resumes_the_other(
    tmp_path: Path, config: dict[str, Any], shape: dict[str, Any], accumulation: int, names: list[str]
) -> None:
    base = merge_config(
        config,
        transformer_architecture=shape,
        topology={"global_batch_size": BATCH},
        learning_rate_scheduler={"learning_rate": 3e-3, "learning_rate_decay_iters": 30},
    )
    last = 2 * len(names)
    groups = 4 + 1  # one per block and one for the rest
    traced = {"fsdp": groups, "hsdp": groups * accumulation}
    for number, name in enumerate(names, start=1):
        topology, size, optimizer, parts = TOPOLOGIES[name]
        replicas = size // prod(topology.get(f"{kind}_parallel_size", 1) for kind in ("model", "pipe", "context"))
        one = merge_config(
            base,
            topology={**topology, "micro_batch_size": BATCH // max(replicas * accumulation, topology.get("pipe_parallel_size", 1))},
            optimizer=optimizer,
            trainer={"train_iterations": 2 * number, "eval_interval": last},
            profiler={"profile_steps": int(name in traced), "profile_start_at_step": 1},
        )
        run_training(tmp_path / "many", one, size)
        chunks = read_manifest(tmp_path / "many", 2 * number)["tensors"]
        assert {len(chunks[f"{part}/embedding.weight"]["chunks"]) for part in ("model", "optimizer/exp_avg")} == {parts}
        if name in traced:
            assert count_collectives(tmp_path / "many", "reduce_scatter") == traced[name]
    bound = {"float32": 1e-6, "float64": 1e-12}[shape["precision"]]
    micro = {"micro_batch_size": BATCH // accumulation}
    together = run_training(tmp_path / "one", merge_config(base, topology=micro, trainer={"train_iterations": last, "eval_interval": last}))
    assert compute_deviation(together, read_losses(tmp_path / "many")) < bound
    alone, many = (
        read_validation_losses(tmp_path / "one"),
        read_validation_losses(tmp_path / "many"),
    )  # each of many has also evaluated at its own end
    assert compute_deviation(alone, {step: many[step] for step in alone}) < bound
    assert together[last] < 0.95 * together[1], "a model that learns nothing is equal to anything"


@pytest.fixture(scope="module")
def uneven_config(config: dict[str, Any]) -> dict[str, Any]:
    """Three micro batches per step: two ranks have unequal numbers of them, and one of four ranks has none."""
    return merge_config(
        config,
        topology={"global_batch_size": 3, "micro_batch_size": 1},
        trainer={"train_iterations": 40, "eval_interval": 20},
        transformer_architecture={"num_layers": 1},
    )


@pytest.fixture(scope="module")
def single_rank_run(tmp_path_factory: pytest.TempPathFactory, uneven_config: dict[str, Any]) -> Path:
    """A run of `uneven_config` on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    run_training(folder, uneven_config)
    return folder


@pytest.mark.parametrize(("name", "changes"), [("fsdp", {"reduce_every_micro_batch": True}), ("hsdp", REDUCED_ONCE), ("zero", {})])
def test_a_sharded_state_is_one_process_bit_for_bit(
    tmp_path: Path, uneven_config: dict[str, Any], single_rank_run: Path, name: str, changes: dict[str, Any]
) -> None:
    """With uneven numbers of micro batches, interrupted half-way, and long enough for a difference in a last bit to show."""
    topology, size, optimizer, _ = TOPOLOGIES[name]
    divided = merge_config(uneven_config, topology={**topology, **changes}, optimizer=optimizer)
    run_training(tmp_path, merge_config(divided, trainer={"train_iterations": 20}), size)
    assert run_training(tmp_path, divided, size) == read_losses(single_rank_run)
    assert read_validation_losses(tmp_path) == read_validation_losses(single_rank_run)


def count_collectives(folder: Path, name: str) -> int:
    """Return how many collectives named `name` the traced step has started."""
    events = json.loads((folder / "run" / "profile.json").read_text())["traceEvents"]
    return sum(name in event.get("name", "") and event["name"].startswith("c10d::") for event in events)


def test_no_rank_has_the_whole_model_even_during_initialization(tmp_path: Path, config: dict[str, Any]) -> None:
    """Two ranks that shard it, and two pipeline stages: each has half of it, plus the current block, and computes half of its values."""
    shape = {"hidden_size": 64, "num_layers": 8, "weight_tying": False}
    whole = 4 * (8 * (4 * 64 * 64 + 2 * 4 * 64 * 64 + 2 * 64) + 2 * 64 * 64 + 64)
    for name, topology in (("fsdp", {"data_parallel_type": "fsdp"}), ("pipeline", {"pipe_parallel_size": 2})):
        deep = merge_config(config, topology=topology, transformer_architecture=shape, trainer={"train_iterations": 0, "save_dir": None})
        world = LocalWorld(tmp_path / name, deep, 2, script="initialization_memory")
        assert world.wait() == [0, 0], world.read_log()
        most, computed = (
            [int(found) for found in re.findall(pattern, world.read_log())]
            for pattern in (r"most while allocating: (\d+) bytes", r"computed (\d+) initial values")
        )
        assert len(most) == 2
        assert 0.4 * whole < max(most) < 0.75 * whole
        assert sum(computed) == whole // 4


@pytest.mark.parametrize("shared", [True, False], ids=["shared disk", "disk of each node"])
def test_a_resumed_run_computes_no_initial_values_and_reads_each_file_once(tmp_path: Path, config: dict[str, Any], *, shared: bool) -> None:
    for steps, is_resumed in ((2, False), (4, True)):
        trainer = {"train_iterations": steps, "save_dir_shared": shared}
        world = LocalWorld(tmp_path, merge_config(config, trainer=trainer), 2, script="initialization_memory")
        assert world.wait() == [0, 0], world.read_log()
        assert world.read_log().count("computed 0 initial values") == (2 if is_resumed else 0)
        assert world.read_log().count("verified 0 files before") == (4 if is_resumed else 2)  # the log has both runs
