"""A part of a model is trained: the rest stays as it is, however all is divided, and what was learned beside it can be put into it."""

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
from worlds import changed, held_out, losses, manifest, train

from swarmtrain.config import Config
from swarmtrain.errors import CheckpointError, SwarmtrainError, TrainingError
from swarmtrain.trainer.checkpoint import whole
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.huggingface.adapter import export_adapter
from swarmtrain.trainer.huggingface.export import export
from swarmtrain.trainer.model import dropout
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import trained_names

GATED = {"norm_type": "rms", "mlp_type": "swiglu", "attention_num_kv_heads": 2, "attention_bias": True, "mlp_bias": True}
LORA = {"rank": 4, "dropout": 0.1, "layers": ["query", "key", "value", "output", "gate", "up", "down"]}
TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {
    "tensor": ({"model_parallel_size": 2}, 2),
    "tensor and sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pipe": ({"pipe_parallel_size": 2}, 2),
    "fsdp": ({"data_parallel_type": "fsdp", "activation_checkpointing_type": "every_layer"}, 2),
}
Base = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def base(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A run of three steps, and a config that goes on from it with LoRA."""
    folder = tmp_path_factory.mktemp("base")
    own = changed(config, transformer_architecture=GATED, trainer={"train_iterations": 3, "eval_iterations": 1})
    train(folder, own)
    begins = {"load_dir": str(folder / "run"), "load_context": False, "load_optimizer_states": False, "train_iterations": 4}
    return folder, changed(own, trainer=begins, transformer_architecture={"lora_config": LORA})


def parameters(folder: Path, step: int) -> dict[str, Tensor]:
    found = whole.find(folder / "run" / f"step-{step:08}")
    shape = found.config.transformer_architecture
    return {name: found.parameter(name, parameter.shape) for name, parameter in Transformer(shape, 0).named_parameters()}


@pytest.fixture(scope="module")
def alone(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, base[1])
    return folder


def test_only_what_is_beside_it_is_trained(base: Base, alone: Path) -> None:
    before, after = parameters(base[0], 3), parameters(alone, 4)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    beside = after.keys() - before.keys()
    assert len(beside) == 2 * 7 * 2
    assert all(after[name].abs().max() > 0 for name in beside)
    kept = [name for name in manifest(alone, 4)["tensors"] if name.startswith("optimizer/")]
    assert {name.split("/", 2)[2] for name in kept} == beside
    measured = held_out(alone)
    assert measured[0] == held_out(base[0])[3], "it begins as it was"
    assert measured[4] < measured[0] - 0.01


def test_its_dropout_is_of_training_alone(alone: Path) -> None:
    shape, learned = whole.find(alone / "run" / "step-00000004").config.transformer_architecture, parameters(alone, 4)
    model, plain = (Transformer(shape.model_copy(update=each), 0).fill() for each in ({}, {"lora_config": None}))
    for each in (model, plain):
        each.load_state_dict({name: learned[name] for name, _ in each.named_parameters()}, strict=False)
    tokens = torch.arange(64).view(2, 32)
    with dropout.at(seed=1, first=0), torch.no_grad():
        dropped = model(tokens)
        assert torch.equal(model(tokens), dropped)
        tuned = model.eval()(tokens)
        assert 0.01 < (dropped - tuned).std() / (plain(tokens) - tuned).std() < 1, "a part of what it adds"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_divided_it_learns_the_same(base: Base, alone: Path, name: str, tmp_path: Path) -> None:
    topology, size = TOPOLOGIES[name]
    found = train(tmp_path, changed(base[1], topology=topology), size)
    assert found == pytest.approx(losses(alone), rel=1e-6)
    wanted = parameters(alone, 4)
    for parameter, value in parameters(tmp_path, 4).items():
        torch.testing.assert_close(value, wanted[parameter], rtol=1e-3, atol=1e-5)


def test_merged_it_computes_the_same(base: Base, alone: Path, tmp_path: Path) -> None:
    export(alone / "run", tmp_path / "out", dtype=None, shard_bytes=2**30)
    beside = whole.find(alone / "run")
    shape = beside.config.transformer_architecture
    plain = shape.model_copy(update={"lora_config": None})
    models = Transformer(shape, 0), Transformer(plain, 0)
    models[0].initial = beside.parameter
    models[1].initial = pretrained.load(tmp_path / "out", plain, {name: one.shape for name, one in models[1].named_parameters()})
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        unmerged, merged = (model.fill().eval()(tokens) for model in models)
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=1e-6)
    base_model = Transformer(plain, 0)
    base_model.initial = whole.find(base[0] / "run").parameter
    with torch.no_grad():
        assert (base_model.fill().eval()(tokens) - merged).abs().max() > 0.01


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
def test_peft_computes_the_same(base: Base, alone: Path, tmp_path: Path) -> None:
    for source, output in ((base[0], "base"), (alone, "merged")):
        export(source / "run", tmp_path / output, dtype=None, shard_bytes=2**30)
    made = export_adapter(alone / "run", tmp_path / "adapter", dtype=None)
    assert made["parameters"] < 20_000
    load = transformers.AutoModelForCausalLM.from_pretrained
    beside = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted, before = (model.eval()(tokens).logits for model in (beside, load(tmp_path / "merged"), load(tmp_path / "base")))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (before - wanted).abs().max() > 0.01
    with pytest.raises(CheckpointError, match="has no LoRA"):
        export_adapter(base[0] / "run", tmp_path / "none", dtype=None)
    train(tmp_path / "more", changed(base[1], trainer={"finetunable_parameters": ["norm", "lora"], "train_iterations": 1}))
    with pytest.raises(CheckpointError, match="more than LoRA that was trained"):
        export_adapter(tmp_path / "more" / "run", tmp_path / "none", dtype=None)


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
def test_biases_alone(base: Base, tmp_path: Path) -> None:
    """BitFit (Ben Zaken et al. 2021, arXiv 2106.10199) is a pattern."""
    own = changed(base[1], transformer_architecture={"lora_config": None}, trainer={"finetunable_parameters": [r"\.bias$"]})
    train(tmp_path / "one", own)
    before, after = parameters(base[0], 3), parameters(tmp_path / "one", 4)
    assert {name for name, value in before.items() if not torch.equal(after[name], value)} == {
        name for name in before if name.endswith(".bias")
    }
    divided = changed(own, topology={"model_parallel_size": 2, "pipe_parallel_size": 2, "data_parallel_type": "fsdp"})
    assert train(tmp_path / "four", divided, 4) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_it_is_taken_up_again_in_another_world(base: Base, alone: Path, tmp_path: Path) -> None:
    own = changed(base[1], trainer={"train_iterations": 2})
    train(tmp_path, own, 2)
    # The learning rate follows the steps there will be; both have the same.
    train(tmp_path, base[1])
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-6)


def test_what_trains_nothing_is_refused(base: Base) -> None:
    def names(trainer: dict[str, Any], topology: dict[str, Any]) -> list[str]:
        config = Config.from_json(json.dumps(changed(base[1], trainer=trainer, topology=topology)))
        return trained_names([name for name, _ in Transformer(config.transformer_architecture, 0).named_parameters()], config)

    with pytest.raises(TrainingError, match="matches no parameter"):
        names({"finetunable_parameters": ["nothing"]}, {})
    with pytest.raises(SwarmtrainError, match="matches nothing in stage 1 of the pipeline"):
        names({"finetunable_parameters": [r"blocks\.0\."]}, {"pipe_parallel_size": 2})
    assert names({"finetunable_parameters": ["embedding"]}, {"pipe_parallel_size": 2}) == ["embedding.weight"]


@pytest.fixture(scope="module")
def apart(base: Base, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose checkpoints have what is trained alone, and its config."""
    folder = tmp_path_factory.mktemp("apart")
    begins = {"load_dir": [], "init_from": str(base[0] / "run" / "step-00000003"), "save_frozen_parameters": False}
    own = changed(base[1], trainer=begins)
    train(folder, own)
    return folder, own


def test_saved_apart_it_is_the_same_model(base: Base, alone: Path, apart: Base, tmp_path: Path) -> None:
    folder, _ = apart
    assert losses(folder) == losses(alone)
    held = {name for name in manifest(folder, 4)["tensors"] if name.startswith("model/")}
    assert all(".lora." in name for name in held)
    whole_size, size = ((each / "run" / "step-00000004" / "part-00000.bin").stat().st_size for each in (alone, folder))
    frozen = sum(value.numel() * 4 for value in parameters(base[0], 3).values())
    assert size == whole_size - frozen
    for source, output in ((alone, "whole"), (folder, "apart")):
        export(source / "run", tmp_path / output, dtype=None, shard_bytes=2**30)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "apart" / "model.safetensors").read_bytes()


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
@pytest.mark.parametrize("name", ["tensor and sequence", "pipe", "fsdp"])
def test_saved_apart_it_is_taken_up_again_in_another_world(apart: Base, name: str, tmp_path: Path) -> None:
    topology, size = TOPOLOGIES[name]
    train(tmp_path, changed(apart[1], topology=topology, trainer={"train_iterations": 2}), size)
    train(tmp_path, apart[1])
    assert losses(tmp_path) == pytest.approx(losses(apart[0]), rel=1e-6)
    # And the next one may save all of it.
    more = changed(apart[1], trainer={"save_frozen_parameters": True, "train_iterations": 5})
    train(tmp_path, more)
    assert any(".lora." not in tensor for tensor in manifest(tmp_path, 5)["tensors"])


def test_the_model_beside_must_be_what_it_was(base: Base, apart: Base, tmp_path: Path) -> None:
    shutil.copytree(apart[0], tmp_path, dirs_exist_ok=True)
    moved = tmp_path / "moved"
    shutil.copytree(base[0] / "run" / "step-00000003", moved)
    train(tmp_path, changed(apart[1], trainer={"init_from": str(moved), "train_iterations": 5}))
    assert whole.find(apart[0] / "run", moved).parameter("norm.weight", (32,)).shape == (32,)
    other = changed(apart[1], trainer={"init_from": None, "load_dir": [], "save_frozen_parameters": True, "train_iterations": 3})
    train(tmp_path / "other", changed(other, trainer={"seed": 7}, transformer_architecture={"lora_config": None}))
    found = tmp_path / "other" / "run" / "step-00000003"
    with pytest.raises(CheckpointError, match=r"beside a model that .* is not"):
        whole.find(apart[0] / "run", found).parameter("norm.weight", (32,))
    with pytest.raises(CheckpointError, match="which is not here"):
        whole.find(apart[0] / "run", tmp_path / "nowhere").parameter("norm.weight", (32,))
    with pytest.raises(AssertionError, match="is another model, or has changed"):
        train(tmp_path, changed(apart[1], trainer={"init_from": str(found), "train_iterations": 6}))
    with pytest.raises(AssertionError, match="is none here"):
        train(tmp_path, changed(apart[1], trainer={"init_from": None, "save_frozen_parameters": True, "train_iterations": 6}))
    with pytest.raises(AssertionError, match="has lora_config of its own"):
        train(tmp_path / "twice", changed(apart[1], trainer={"init_from": str(apart[0] / "run" / "step-00000004")}))


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
@pytest.mark.parametrize("tied", [True, False])
def test_chosen_tokens_alone(base: Base, config: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    own = changed(config, trainer={"train_iterations": 3}, transformer_architecture={"weight_tying": tied})
    train(tmp_path / "base", own)
    tuned = {"load_dir": str(tmp_path / "base" / "run"), "load_context": False, "train_iterations": 4, "finetunable_token_ids": [3, 60]}
    own = changed(own, trainer=tuned)
    train(tmp_path / "one", own)
    before, after = parameters(tmp_path / "base", 3), parameters(tmp_path / "one", 4)
    assert {name for name, value in before.items() if not torch.equal(after[name], value)} == {"embedding.weight"}
    moved = (after["embedding.weight"] != before["embedding.weight"]).any(dim=1).nonzero().flatten().tolist()
    assert moved == [3, 60]
    tensor = {"model_parallel_size": 2, "data_parallel_type": "fsdp"}
    pipe = {"pipe_parallel_size": 2, "data_parallel_type": "ddp"}
    for number, topology in enumerate([tensor, pipe] if tied else [tensor]):
        found = train(tmp_path / f"divided{number}", changed(own, topology=topology), 4)
        assert found == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    muon = {**own, "training_groups": [{"group_name": "all", "method": "muon"}]}
    with pytest.raises(AssertionError, match="Muon would move all of the embedding"):
        train(tmp_path / "muon", muon)


ADAPTERS = {"lora_config": None, "adapter_config": {"mlp_downsampling_factor": 0.5}}


@pytest.mark.test_all_only("one more kind of adapter or checkpoint; the gate has LoRA in every topology")
def test_adapters(base: Base, tmp_path: Path) -> None:
    own = changed(base[1], transformer_architecture=ADAPTERS)
    train(tmp_path / "one", own)
    before, after = parameters(base[0], 3), parameters(tmp_path / "one", 4)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    beside = {name: value for name, value in after.items() if name not in before}
    assert len(beside) == 2 * 2 * 4
    assert beside["blocks.1.adapter.after_attention.narrow.weight"].shape == (8, 32)
    assert beside["blocks.1.adapter.after_mlp.narrow.weight"].shape == (16, 32)
    assert all(value.abs().max() > 0 for value in beside.values())
    assert held_out(tmp_path / "one")[0] == held_out(base[0])[3], "it begins as it was"
    for name, (topology, size) in TOPOLOGIES.items():
        found = train(tmp_path / name, changed(own, topology=topology), size)
        assert found == pytest.approx(losses(tmp_path / "one"), rel=1e-6), name
    with pytest.raises(SwarmtrainError, match="adapter_config would be None and is set"):
        export(tmp_path / "one" / "run", tmp_path / "out", dtype=None, shard_bytes=2**30)
