"""Training a part of a model: the rest stays unchanged under every parallelism, and adapters can be merged into it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from worlds import merge_config, read_losses, read_manifest, read_validation_losses, run_training

from swarmtrain.config import Config
from swarmtrain.errors import CheckpointError, SwarmtrainError, TrainingError
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.export.adapter_export import export_lora_adapter
from swarmtrain.trainer.export.checkpoint_export import export_checkpoint
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.model import dropout
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallelization import select_trained_parameter_names

GATED = {"norm_type": "rms", "mlp_type": "swiglu", "attention_num_kv_heads": 2, "attention_bias": True, "mlp_bias": True}
LORA = {"rank": 4, "dropout": 0.1, "layers": ["query", "key", "value", "output", "gate", "up", "down"]}
TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {
    "tensor": ({"model_parallel_size": 2}, 2),
    "tensor and sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pipe": ({"pipe_parallel_size": 2}, 2),
    "fsdp": ({"data_parallel_type": "fsdp", "activation_checkpointing_type": "every_layer"}, 2),
}
RunAndConfig = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def base_run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunAndConfig:
    """A run of three steps, and a config that continues from it with LoRA."""
    folder = tmp_path_factory.mktemp("base")
    base_config = merge_config(config, transformer_architecture=GATED, trainer={"train_iterations": 3, "eval_iterations": 1})
    run_training(folder, base_config)
    resume_settings = {"load_dir": str(folder / "run"), "load_context": False, "load_optimizer_states": False, "train_iterations": 4}
    return folder, merge_config(base_config, trainer=resume_settings, transformer_architecture={"lora_config": LORA})


def read_parameters(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = consolidated.find_checkpoint(folder / "run" / f"step-{step:08}")
    architecture = checkpoint.config.transformer_architecture
    return {name: checkpoint.load_parameter(name, parameter.shape) for name, parameter in Transformer(architecture, 0).named_parameters()}


@pytest.fixture(scope="module")
def single_rank_run(base_run: RunAndConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_training(folder, base_run[1])
    return folder


def test_only_the_adapter_is_trained(base_run: RunAndConfig, single_rank_run: Path) -> None:
    before, after = read_parameters(base_run[0], 3), read_parameters(single_rank_run, 4)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    beside = after.keys() - before.keys()
    assert len(beside) == 2 * 7 * 2
    assert all(after[name].abs().max() > 0 for name in beside)
    kept = [name for name in read_manifest(single_rank_run, 4)["tensors"] if name.startswith("optimizer/")]
    assert {name.split("/", 2)[2] for name in kept} == beside
    measured = read_validation_losses(single_rank_run)
    assert measured[0] == read_validation_losses(base_run[0])[3], "it begins as it was"
    assert measured[4] < measured[0] - 0.01


def test_its_dropout_is_active_in_training_only(single_rank_run: Path) -> None:
    architecture, learned = (
        consolidated.find_checkpoint(single_rank_run / "run" / "step-00000004").config.transformer_architecture,
        read_parameters(single_rank_run, 4),
    )
    model, plain = (Transformer(architecture.model_copy(update=each), 0).init_weights() for each in ({}, {"lora_config": None}))
    for each in (model, plain):
        each.load_state_dict({name: learned[name] for name, _ in each.named_parameters()}, strict=False)
    tokens = torch.arange(64).view(2, 32)
    with dropout.seed_dropout(seed=1, first_sample=0), torch.no_grad():
        dropped = model(tokens)
        assert torch.equal(model(tokens), dropped)
        tuned = model.eval()(tokens)
        assert 0.01 < (dropped - tuned).std() / (plain(tokens) - tuned).std() < 1, "a part of what it adds"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_sharded_it_learns_the_same(base_run: RunAndConfig, single_rank_run: Path, name: str, tmp_path: Path) -> None:
    topology, size = TOPOLOGIES[name]
    found = run_training(tmp_path, merge_config(base_run[1], topology=topology), size)
    assert found == pytest.approx(read_losses(single_rank_run), rel=1e-6)
    wanted = read_parameters(single_rank_run, 4)
    for parameter, value in read_parameters(tmp_path, 4).items():
        torch.testing.assert_close(value, wanted[parameter], rtol=1e-3, atol=1e-5)


def test_merged_it_computes_the_same(base_run: RunAndConfig, single_rank_run: Path, tmp_path: Path) -> None:
    export_checkpoint(single_rank_run / "run", tmp_path / "out", dtype=None, shard_bytes=2**30)
    beside = consolidated.find_checkpoint(single_rank_run / "run")
    architecture = beside.config.transformer_architecture
    plain = architecture.model_copy(update={"lora_config": None})
    models = Transformer(architecture, 0), Transformer(plain, 0)
    models[0].initial_values = LoadedParameters(beside.load_parameter)
    models[1].initial_values = LoadedParameters(
        pretrained.build_parameter_loader(tmp_path / "out", plain, {name: one.shape for name, one in models[1].named_parameters()})
    )
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        unmerged, merged = (model.init_weights().eval()(tokens) for model in models)
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=1e-6)
    base_model = Transformer(plain, 0)
    base_model.initial_values = LoadedParameters(consolidated.find_checkpoint(base_run[0] / "run").load_parameter)
    with torch.no_grad():
        assert (base_model.init_weights().eval()(tokens) - merged).abs().max() > 0.01


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
def test_peft_computes_the_same(base_run: RunAndConfig, single_rank_run: Path, tmp_path: Path) -> None:
    for source, output in ((base_run[0], "base"), (single_rank_run, "merged")):
        export_checkpoint(source / "run", tmp_path / output, dtype=None, shard_bytes=2**30)
    made = export_lora_adapter(single_rank_run / "run", tmp_path / "adapter", dtype=None)
    assert made["parameters"] < 20_000
    load = transformers.AutoModelForCausalLM.from_pretrained
    beside = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted, before = (model.eval()(tokens).logits for model in (beside, load(tmp_path / "merged"), load(tmp_path / "base")))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (before - wanted).abs().max() > 0.01
    with pytest.raises(CheckpointError, match="has no LoRA"):
        export_lora_adapter(base_run[0] / "run", tmp_path / "none", dtype=None)
    run_training(tmp_path / "more", merge_config(base_run[1], trainer={"finetunable_parameters": ["norm", "lora"], "train_iterations": 1}))
    with pytest.raises(CheckpointError, match="trained parameters other than LoRA"):
        export_lora_adapter(tmp_path / "more" / "run", tmp_path / "none", dtype=None)


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
def test_biases_alone(base_run: RunAndConfig, tmp_path: Path) -> None:
    """BitFit (Ben Zaken et al. 2021, arXiv 2106.10199) is a parameter pattern."""
    own = merge_config(base_run[1], transformer_architecture={"lora_config": None}, trainer={"finetunable_parameters": [r"\.bias$"]})
    run_training(tmp_path / "one", own)
    before, after = read_parameters(base_run[0], 3), read_parameters(tmp_path / "one", 4)
    assert {name for name, value in before.items() if not torch.equal(after[name], value)} == {
        name for name in before if name.endswith(".bias")
    }
    divided = merge_config(own, topology={"model_parallel_size": 2, "pipe_parallel_size": 2, "data_parallel_type": "fsdp"})
    assert run_training(tmp_path / "four", divided, 4) == pytest.approx(read_losses(tmp_path / "one"), rel=1e-6)


def test_it_resumes_in_another_world(base_run: RunAndConfig, single_rank_run: Path, tmp_path: Path) -> None:
    own = merge_config(base_run[1], trainer={"train_iterations": 2})
    run_training(tmp_path, own, 2)
    # The learning rate depends on the configured decay steps, which are the same in both.
    run_training(tmp_path, base_run[1])
    assert read_losses(tmp_path) == pytest.approx(read_losses(single_rank_run), rel=1e-6)


def test_what_trains_nothing_is_refused(base_run: RunAndConfig) -> None:
    def names(trainer: dict[str, Any], topology: dict[str, Any]) -> list[str]:
        config = Config.from_json(json.dumps(merge_config(base_run[1], trainer=trainer, topology=topology)))
        return select_trained_parameter_names(
            [name for name, _ in Transformer(config.transformer_architecture, 0).named_parameters()], config
        )

    with pytest.raises(TrainingError, match="matches no parameter"):
        names({"finetunable_parameters": ["nothing"]}, {})
    with pytest.raises(SwarmtrainError, match="matches no parameter in stage 1 of the pipeline"):
        names({"finetunable_parameters": [r"blocks\.0\."]}, {"pipe_parallel_size": 2})
    assert names({"finetunable_parameters": ["embedding"]}, {"pipe_parallel_size": 2}) == ["embedding.weight"]


@pytest.fixture(scope="module")
def adapter_only_run(base_run: RunAndConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose checkpoints have trained parameters only, and its config."""
    folder = tmp_path_factory.mktemp("apart")
    init_settings = {"load_dir": [], "init_from": str(base_run[0] / "run" / "step-00000003"), "save_frozen_parameters": False}
    adapter_config = merge_config(base_run[1], trainer=init_settings)
    run_training(folder, adapter_config)
    return folder, adapter_config


def test_saved_separately_it_is_the_same_model(
    base_run: RunAndConfig, single_rank_run: Path, adapter_only_run: RunAndConfig, tmp_path: Path
) -> None:
    folder, _ = adapter_only_run
    assert read_losses(folder) == read_losses(single_rank_run)
    held = {name for name in read_manifest(folder, 4)["tensors"] if name.startswith("model/")}
    assert all(".lora." in name for name in held)
    whole_size, size = ((each / "run" / "step-00000004" / "part-00000.bin").stat().st_size for each in (single_rank_run, folder))
    frozen = sum(value.numel() * 4 for value in read_parameters(base_run[0], 3).values())
    assert size == whole_size - frozen
    for source, output in ((single_rank_run, "whole"), (folder, "apart")):
        export_checkpoint(source / "run", tmp_path / output, dtype=None, shard_bytes=2**30)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "apart" / "model.safetensors").read_bytes()


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
@pytest.mark.parametrize("name", ["tensor and sequence", "pipe", "fsdp"])
def test_saved_separately_it_resumes_in_another_world(adapter_only_run: RunAndConfig, name: str, tmp_path: Path) -> None:
    topology, size = TOPOLOGIES[name]
    run_training(tmp_path, merge_config(adapter_only_run[1], topology=topology, trainer={"train_iterations": 2}), size)
    run_training(tmp_path, adapter_only_run[1])
    assert read_losses(tmp_path) == pytest.approx(read_losses(adapter_only_run[0]), rel=1e-6)
    # And the next run may save all parameters.
    more = merge_config(adapter_only_run[1], trainer={"save_frozen_parameters": True, "train_iterations": 5})
    run_training(tmp_path, more)
    assert any(".lora." not in tensor for tensor in read_manifest(tmp_path, 5)["tensors"])


def test_the_base_model_must_be_unchanged(base_run: RunAndConfig, adapter_only_run: RunAndConfig, tmp_path: Path) -> None:
    shutil.copytree(adapter_only_run[0], tmp_path, dirs_exist_ok=True)
    moved = tmp_path / "moved"
    shutil.copytree(base_run[0] / "run" / "step-00000003", moved)
    run_training(tmp_path, merge_config(adapter_only_run[1], trainer={"init_from": str(moved), "train_iterations": 5}))
    assert consolidated.find_checkpoint(adapter_only_run[0] / "run", moved).load_parameter("norm.weight", (32,)).shape == (32,)
    other = merge_config(
        adapter_only_run[1], trainer={"init_from": None, "load_dir": [], "save_frozen_parameters": True, "train_iterations": 3}
    )
    run_training(tmp_path / "other", merge_config(other, trainer={"seed": 7}, transformer_architecture={"lora_config": None}))
    found = tmp_path / "other" / "run" / "step-00000003"
    with pytest.raises(CheckpointError, match=r"adapter whose base model is not .*, or that"):
        consolidated.find_checkpoint(adapter_only_run[0] / "run", found).load_parameter("norm.weight", (32,))
    with pytest.raises(CheckpointError, match="which is not on this machine"):
        consolidated.find_checkpoint(adapter_only_run[0] / "run", tmp_path / "nowhere").load_parameter("norm.weight", (32,))
    with pytest.raises(AssertionError, match="is a different model, or has changed"):
        run_training(tmp_path, merge_config(adapter_only_run[1], trainer={"init_from": str(found), "train_iterations": 6}))
    with pytest.raises(AssertionError, match="is not set"):
        run_training(
            tmp_path, merge_config(adapter_only_run[1], trainer={"init_from": None, "save_frozen_parameters": True, "train_iterations": 6})
        )
    with pytest.raises(AssertionError, match="already has lora_config"):
        run_training(
            tmp_path / "twice", merge_config(adapter_only_run[1], trainer={"init_from": str(adapter_only_run[0] / "run" / "step-00000004")})
        )


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
@pytest.mark.parametrize("tied", [True, False])
def test_chosen_tokens_alone(base_run: RunAndConfig, config: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    own = merge_config(config, trainer={"train_iterations": 3}, transformer_architecture={"weight_tying": tied})
    run_training(tmp_path / "base", own)
    tuned = {"load_dir": str(tmp_path / "base" / "run"), "load_context": False, "train_iterations": 4, "finetunable_token_ids": [3, 60]}
    own = merge_config(own, trainer=tuned)
    run_training(tmp_path / "one", own)
    before, after = read_parameters(tmp_path / "base", 3), read_parameters(tmp_path / "one", 4)
    assert {name for name, value in before.items() if not torch.equal(after[name], value)} == {"embedding.weight"}
    moved = (after["embedding.weight"] != before["embedding.weight"]).any(dim=1).nonzero().flatten().tolist()
    assert moved == [3, 60]
    tensor = {"model_parallel_size": 2, "data_parallel_type": "fsdp"}
    pipe = {"pipe_parallel_size": 2, "data_parallel_type": "ddp"}
    for number, topology in enumerate([tensor, pipe] if tied else [tensor]):
        found = run_training(tmp_path / f"divided{number}", merge_config(own, topology=topology), 4)
        assert found == pytest.approx(read_losses(tmp_path / "one"), rel=1e-6)
    muon = {**own, "training_groups": [{"group_name": "all", "method": "muon"}]}
    with pytest.raises(AssertionError, match="Muon would update the whole embedding"):
        run_training(tmp_path / "muon", muon)


ADAPTERS = {"lora_config": None, "adapter_config": {"mlp_downsampling_factor": 0.5}}


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
def test_adapters(base_run: RunAndConfig, tmp_path: Path) -> None:
    own = merge_config(base_run[1], transformer_architecture=ADAPTERS)
    run_training(tmp_path / "one", own)
    before, after = read_parameters(base_run[0], 3), read_parameters(tmp_path / "one", 4)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    beside = {name: value for name, value in after.items() if name not in before}
    assert len(beside) == 2 * 2 * 4
    assert beside["blocks.1.adapter.after_attention.down_projection.weight"].shape == (8, 32)
    assert beside["blocks.1.adapter.after_mlp.down_projection.weight"].shape == (16, 32)
    assert all(value.abs().max() > 0 for value in beside.values())
    assert read_validation_losses(tmp_path / "one")[0] == read_validation_losses(base_run[0])[3], "it begins as it was"
    for name, (topology, size) in TOPOLOGIES.items():
        found = run_training(tmp_path / name, merge_config(own, topology=topology), size)
        assert found == pytest.approx(read_losses(tmp_path / "one"), rel=1e-6), name
    with pytest.raises(SwarmtrainError, match="adapter_config must be None, not set"):
        export_checkpoint(tmp_path / "one" / "run", tmp_path / "out", dtype=None, shard_bytes=2**30)
