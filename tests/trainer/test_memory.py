"""The simulated memory estimate, compared with the memory of tensors and processes in real worlds."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import worlds

from swarmtrain.config import Config
from swarmtrain.trainer.memory import AllocationKind, estimate_memory, suggest_memory_savings
from swarmtrain.trainer.memory.simulation import simulate_memory_peaks
from swarmtrain.trainer.speed.session import open_session

TOLERANCE, FSDP_TOLERANCE = 0.06, 0.08
"""Relative to tensor memory. fully_shard over gloo holds a block's gradients for a moment longer than a simulation can know."""
KERNEL_TOLERANCE = 0.3
"""Maximum share of the C library's allocations beyond the estimate: temporaries of operations and gloo, and Python itself."""
SHAPE = {"vocab_size": 2048, "hidden_size": 256, "num_layers": 4, "sequence_length": 64}
WORLDS: dict[str, dict[str, Any]] = {
    "ddp": {"transformer_architecture": {"precision": "bfloat16"}, "topology": {"activation_checkpointing_type": "every_layer"}},
    "fsdp": {"topology": {"data_parallel_type": "fsdp"}},
    "fsdp, bfloat16": {"transformer_architecture": {"precision": "bfloat16"}, "topology": {"data_parallel_type": "fsdp"}},
    "tensor": {"topology": {"model_parallel_size": 2, "sequence_parallel": True}},
    "pipeline": {"topology": {"pipe_parallel_size": 2}},
    "powersgd": {"topology": {"gradient_compression": "powersgd", "powersgd": {"start_step": 0, "matrix_approximation_rank": 4}}},
}


@pytest.mark.parametrize(
    "name",
    [
        "fsdp, bfloat16",
        pytest.param("fsdp", marks=pytest.mark.test_all_only("the same in float32")),
        pytest.param("tensor", marks=pytest.mark.test_all_only("a second topology")),
        pytest.param("ddp", marks=pytest.mark.test_all_only("a third topology")),
        pytest.param("pipeline", marks=pytest.mark.test_all_only("a fourth topology")),
        pytest.param("powersgd", marks=pytest.mark.test_all_only("error feedback")),
    ],
)
def test_a_simulation_estimates_the_peak(name: str, config: Mapping[str, Any], tmp_path: Path) -> None:
    wanted = worlds.merge_config(
        worlds.merge_config(config, transformer_architecture=SHAPE, topology={"global_batch_size": 8}), **WORLDS[name]
    )
    world = worlds.LocalWorld(tmp_path, wanted, 2, script="measure_peak_memory")
    assert world.wait() == [0, 0], world.read_log()
    for rank in range(2):
        started, stepped = simulate_memory_peaks(Config.model_validate_json(json.dumps(wanted)), 2, rank)
        estimate = max(started.size, stepped.size)
        tensors, process = map(int, (tmp_path / f"peak-{rank}").read_text().split())
        assert abs(estimate / tensors - 1) < (FSDP_TOLERANCE if name.startswith("fsdp") else TOLERANCE)
        assert estimate / process - 1 > -KERNEL_TOLERANCE
        assert sum(stepped.breakdown.values()) == stepped.size


def test_rms_norms_need_no_more_memory_than_layer_norms(config: Mapping[str, Any]) -> None:
    """As on a GPU: on a CPU, torch composes an RMS norm of operations that keep more for the backward pass."""
    rms, layer = (
        simulate_memory_peaks(
            Config.model_validate_json(json.dumps(worlds.merge_config(config, transformer_architecture={**SHAPE, "norm_type": kind}))), 1, 0
        )[1]
        for kind in ("rms", "layernorm")
    )
    assert 0 < rms.breakdown[AllocationKind.activations] <= layer.breakdown[AllocationKind.activations]


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_is_freed_after_training(precision: str) -> None:
    """Its parameters hold hooks in C++, where the garbage collector does not look: these must not hold the model."""
    shape = {"vocab_size": 16, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 4, "sequence_length": 8, "precision": precision}
    with open_session(Config.model_validate_json(json.dumps({"transformer_architecture": shape}))) as session:
        session.run_step(1)
        model = weakref.ref(session.model.local_model)
    del session
    gc.collect()
    assert model() is None


def build_sharded_config(ranks: int, accumulation: int, **architecture: Any) -> Config:
    topology = {
        "data_parallel_type": "fsdp",
        "activation_checkpointing_type": "every_layer",
        "micro_batch_size": 1,
        "global_batch_size": ranks * accumulation,
    }
    shape = {"norm_type": "rms", "mlp_type": "swiglu", "weight_tying": False, "precision": "bfloat16", **architecture}
    return Config.model_validate_json(json.dumps({"topology": topology, "transformer_architecture": shape}))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_no_rank_holds_the_bfloat16_weights_of_the_whole_model(accumulation: int) -> None:
    """A layer more costs a rank its shards of the layer's state, and the layer's input."""
    width, length, ranks = 512, 64, 8
    shape = {"vocab_size": 1024, "hidden_size": width, "mlp_factor": 4.0, "num_attention_heads": 8, "sequence_length": length}
    fewer, more = (
        simulate_memory_peaks(build_sharded_config(ranks, accumulation, num_layers=layers, **shape), ranks, 0)[1].size for layers in (4, 8)
    )
    state_of_a_layer = (4 + 3 * 4) * width**2 * (4 + 4 + 8) / ranks  # parameters, gradients and moments in float32
    assert (more - fewer) / 4 < 1.02 * state_of_a_layer + 2 * width * length


@pytest.mark.test_all_only("simulates large models; the gate has the same claim for a layer")
@pytest.mark.parametrize(("layers", "width", "ranks"), [(32, 4096, 8), (80, 8192, 64)], ids=["8 B", "70 B"])
def test_large_models_fit_into_gpus_of_80_gb(layers: int, width: int, ranks: int) -> None:
    shape = {"vocab_size": 128256, "hidden_size": width, "mlp_factor": 3.5, "num_attention_heads": width // 128}
    config = build_sharded_config(ranks, 1, num_layers=layers, attention_num_kv_heads=8, sequence_length=4096, **shape)
    assert simulate_memory_peaks(config, ranks, 0)[1].size < 0.5 * 80e9


def build_fine_tuning_config(layers: int, **sections: Any) -> Config:
    """Return the config of a model with layers of 8 B parameters and a vocabulary of 128,256 tokens, that is tuned with LoRA on one GPU."""
    shape = {
        **{"vocab_size": 128256, "hidden_size": 4096, "num_layers": layers, "num_attention_heads": 32, "attention_num_kv_heads": 8},
        **{"mlp_factor": 3.5, "sequence_length": 4096, "norm_type": "rms", "mlp_type": "swiglu", "weight_tying": False},
        **{"precision": "bfloat16", "lora_config": {}},
    }
    topology = {"activation_checkpointing_type": "every_layer", "micro_batch_size": 1, "global_batch_size": 1}
    return Config.model_validate_json(json.dumps({"topology": topology, "transformer_architecture": shape, **sections}))


@pytest.mark.test_all_only("simulates a large model; the gate compares the memory of frozen parameters")
def test_lora_on_a_model_of_8_b_parameters_fits_into_20_gib() -> None:
    assert max(peak.size for peak in simulate_memory_peaks(build_fine_tuning_config(32), 1, 0)) < 20 * 2**30


def test_frozen_parameters_take_two_bytes_each() -> None:
    few, many = (simulate_memory_peaks(build_fine_tuning_config(layers), 1, 0)[1] for layers in (1, 2))
    layer = (2 + 2 / 4 + 3 * 3.5) * 4096**2
    assert (many.breakdown[AllocationKind.parameters] - few.breakdown[AllocationKind.parameters]) / layer == pytest.approx(2, rel=0.01)


def test_preference_tuning_has_the_logits_of_one_chunk_in_memory() -> None:
    data = {"data_prefixes": ["a"], "rejected_prefixes": ["b"]}
    peak = simulate_memory_peaks(build_fine_tuning_config(1, data=data, trainer={"preference_config": {}}), 1, 0)[1]
    assert 0 < peak.breakdown[AllocationKind.logits] < 2 * 2**30


@pytest.mark.test_all_only("simulates many configs; the gate compares estimate and allocation")
def test_memory_of_a_pipeline_with_many_micro_batches(config: Mapping[str, Any]) -> None:
    """The estimate extrapolated from short steps equals the peak of the full step."""
    topology = {"pipe_parallel_size": 2, "global_batch_size": 20, "micro_batch_size": 1}
    wanted = Config.model_validate_json(json.dumps(worlds.merge_config(config, topology=topology)))
    for need in estimate_memory(wanted, 2):
        assert need.peak == simulate_memory_peaks(wanted, 2, need.rank)[1].size
        assert need.breakdown[AllocationKind.pipeline_buffers] > 0


@pytest.mark.test_all_only("simulates many configs; the gate compares estimate and allocation")
def test_what_would_need_less(config: Mapping[str, Any]) -> None:
    """Every change is tried, and changes that are incompatible with the rest are skipped."""
    wanted = Config.model_validate_json(json.dumps(worlds.merge_config(config, transformer_architecture={"precision": "bfloat16"})))
    whole = estimate_memory(wanted, 2)[0].peak
    tried = {changes: found[0].peak for changes, found in suggest_memory_savings(wanted, 2)}
    assert tried[("topology.data_parallel_type=fsdp",)] < whole
    assert tried[("topology.activation_checkpointing_type=every_layer",)] < whole
    assert min(tried.values()) < tried[("topology.micro_batch_size=1",)] < whole


def test_each_learner_has_its_own_parameters_and_optimizer_state(config: Mapping[str, Any]) -> None:
    """With AdamW 3 times the parameters per learner, and once more for each learner while exchanges overlap."""

    def estimate_state(learners: int, diloco: Mapping[str, Any]) -> int:
        wanted = worlds.merge_config(config, topology={"learners": learners}, diloco=diloco)
        (estimate,) = estimate_memory(Config.model_validate_json(json.dumps(wanted)), 1)
        return estimate.breakdown[AllocationKind.optimizer_state]

    (plain,) = estimate_memory(Config.model_validate_json(json.dumps(config)), 1)
    parameters = plain.breakdown[AllocationKind.optimizer_state] / 2
    one, two, overlapping = estimate_state(1, {}), estimate_state(2, {}), estimate_state(2, {"overlap": 1})
    assert (one / parameters, two / parameters, overlapping / parameters) == pytest.approx((4, 7, 9), rel=1e-3)


@pytest.mark.test_all_only("starts commands; the gate has the estimates")
def test_it_is_printed_without_a_cluster(config: Mapping[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(json.dumps(config))
    options = ["--ranks", "2", "--device-memory", "1GiB", "-o", "transformer_architecture.num_layers=1", "--json"]
    command = [sys.executable, "-m", "swarmtrain", "memory", "config.yml", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["world_size"], report["worst"], report["fits"], report["alternatives"]) == (2, 0, True, [])
    assert sum(report["ranks"][0]["memory_by_category"].values()) == report["ranks"][0]["peak"] > 2**16


def test_a_simulated_world_does_not_depend_on_those_simulated_before() -> None:
    """DTensor caches layouts with their mesh, and process groups of an earlier world no longer exist."""
    architecture = {"vocab_size": 16, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 4, "sequence_length": 8}
    topology = {"global_batch_size": 2, "micro_batch_size": 1, "model_parallel_size": 4, "sequence_parallel": True}
    ddp, hsdp = (
        Config.model_validate_json(json.dumps({"topology": topology | kind, "transformer_architecture": architecture}))
        for kind in ({"data_parallel_type": "ddp"}, {"data_parallel_type": "hsdp", "data_parallel_shard_size": 2})
    )
    alone = simulate_memory_peaks(ddp, 8, 1)
    simulate_memory_peaks(ddp, 8, 5)
    simulate_memory_peaks(hsdp, 8, 5)
    assert [peak.size for peak in simulate_memory_peaks(ddp, 8, 1)] == [peak.size for peak in alone]
