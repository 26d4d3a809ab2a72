"""Hugging Face export and import: transformers loads an export and computes the same, and a run initializes from a given model.

Small models of every family, no network.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenize_helpers import write_tokenizer
from worlds import merge_config, run_training

from swarmtrain.config import huggingface_config
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint, SwarmtrainError
from swarmtrain.trainer.checkpoint import manifest as manifests
from swarmtrain.trainer.checkpoint.storage.tensor_reader import load_tensors
from swarmtrain.trainer.export.checkpoint_export import export_checkpoint
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer

MODERN = {"norm_type": "rms", "mlp_type": "swiglu", "mlp_factor": 2.75}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **MODERN,
        "attention_num_kv_heads": 2,
        "weight_tying": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rotary_scaling": {"original_sequence_length": 16},
    },
    "qwen2": {**MODERN, "attention_num_kv_heads": 2, "attention_bias": True, "attention_output_bias": False},
    "qwen3": {**MODERN, "attention_num_kv_heads": 1, "attention_head_size": 12, "key_query_norm": True, "rotary_embedding_base": 50000},
    "mistral": {**MODERN, "weight_tying": False, "num_local_attention_heads": 4, "local_attention_window_size": 5},
    "gpt_neox": {
        "layernorm": {"layernorm_bias": True},
        "mlp_bias": True,
        "attention_bias": True,
        "rotary_percentage": 0.5,
        "weight_tying": False,
        "parallel_residual": True,
    },
    "gpt2": {
        "layernorm": {"layernorm_bias": True},
        "mlp_bias": True,
        "attention_bias": True,
        "relative_position_embedding_type": "none",
        "learned_positions": True,
        "activation_function": "gelu_tanh",
    },
}
GIB = 2**30
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def trained_runs(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """For each family, the folder of a run of two steps, and its config."""
    runs = {}
    for name, shape in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        training_config = merge_config(config, transformer_architecture=shape, trainer={"train_iterations": 2, "eval_iterations": 1})
        run_training(folder, training_config)
        runs[name] = folder, training_config
    return runs


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same(trained_runs: dict[str, tuple[Path, dict[str, Any]]], name: str, tmp_path: Path) -> None:
    folder, config = trained_runs[name]
    made = export_checkpoint(folder / "run", tmp_path / "out", dtype=None, shard_bytes=20_000)
    assert (made["family"], made["step"]) == (name, 2)
    assert len(made["files"]) > 1
    theirs, loading_info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading_info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = _load_newest_model(folder, config)(tokens), theirs.eval()(tokens).logits
    assert found.dtype == torch.float32
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


TRANSFORMERS_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 12, "rope_parameters": LLAMA3 | {"rope_theta": 1000.0}},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 4, "sliding_window": 6},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48},
}


@pytest.mark.parametrize("name", TRANSFORMERS_SHAPES)
def test_a_transformers_model_computes_the_same_here(name: str, tmp_path: Path) -> None:
    """The default config of transformers, random values everywhere, several files; samples shorter than that model's.

    In float64 no rounding hides a difference, though transformers computes norms or rotations of some families in float32.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
    given = transformers.AutoConfig.for_model(name, **{"vocab_size": 64, **({} if name == "gpt2" else sizes), **TRANSFORMERS_SHAPES[name]})
    theirs = transformers.AutoModelForCausalLM.from_config(given).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3, generator=generator)
    theirs.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    folders = ["whole"]
    if given.tie_word_embeddings:
        theirs.base_model.save_pretrained(tmp_path / "base")
        folders.append("base")
    tokens = torch.randint(64, (2, 32), generator=generator)
    imported = [import_model(tmp_path / folder) for folder in folders]
    for dtype, most in ((torch.float32, 1e-5), (torch.float64, 1e-6)):
        with torch.no_grad():
            expected = theirs.to(dtype)(tokens).logits
            results = [ours.to(dtype)(tokens) for ours in imported]
        assert expected.std() > 0.1
        for result in results:
            print(f"{name} {dtype}: {(result - expected).abs().max():.1e}")
            torch.testing.assert_close(result, expected, rtol=0, atol=most)


def import_model(folder: Path) -> Transformer:
    """Return the model in a folder that transformers wrote, with a sequence length of 32 tokens."""
    read = json.loads((folder / "config.json").read_text())
    shape = huggingface_config.read_architecture(read, "config.json").model_copy(update={"sequence_length": 32})
    model = Transformer(shape, 0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.initial_values = LoadedParameters(pretrained.build_parameter_loader(folder, shape, shapes))
    return model.init_weights().eval()


def test_one_file_in_bfloat16(trained_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    step = trained_runs["llama"][0] / "run" / "step-00000002"
    made = export_checkpoint(step, tmp_path / "out", dtype="bfloat16", shard_bytes=GIB)
    assert made["files"] == ["model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 2 * made["parameters"] < size < 2 * made["parameters"] + 8192


def test_a_tokenizer_is_exported_with_it(trained_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 5, "b": 7}, unk_token="a"))  # noqa: S106  # not a password
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    export_checkpoint(
        trained_runs["llama"][0] / "run", tmp_path / "out", dtype=None, shard_bytes=GIB, tokenizer=tmp_path / "tokenizer.json"
    )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("b a b").input_ids == [7, 5, 7]
    with pytest.raises(CheckpointError, match="is not a valid tokenizer"):
        export_checkpoint(
            trained_runs["llama"][0] / "run", tmp_path / "no", dtype=None, shard_bytes=GIB, tokenizer=tmp_path / "out" / "config.json"
        )


def test_an_exported_model_ends_its_texts_with_the_tokens_of_its_data_and_tokenizer(
    trained_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, config = trained_runs["llama"]
    (prefix,) = config["data"]["data_prefixes"][:1]
    meta_path = Path(f"{prefix}.meta.json")
    meta = json.loads(meta_path.read_text())
    export = partial(export_checkpoint, folder / "run", dtype=None, shard_bytes=GIB)
    try:
        for stop_tokens, expected in (([5], 5), ([5, 9, 10**6], [5, 9]), ([], None)):
            meta_path.write_text(json.dumps({**meta, "stop_tokens": stop_tokens}))
            output = tmp_path / f"out{len(stop_tokens)}"
            export(output)
            assert json.loads((output / "config.json").read_text())["eos_token_id"] == expected
            assert transformers.AutoModelForCausalLM.from_pretrained(output).generation_config.eos_token_id == expected
    finally:
        meta_path.write_text(json.dumps(meta))
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    export(tmp_path / "with-tokenizer", tokenizer=tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "with-tokenizer" / "generation_config.json").read_text()) == {"eos_token_id": 1}


def test_what_cannot_be_exported_is_refused(
    trained_runs: dict[str, tuple[Path, dict[str, Any]]], config: dict[str, Any], tmp_path: Path
) -> None:
    source = trained_runs["llama"][0] / "run"
    with pytest.raises(CheckpointError, match="already exists"):
        export_checkpoint(source, tmp_path, dtype=None, shard_bytes=GIB)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out", dtype=None, shard_bytes=GIB)
    strange = merge_config(config, transformer_architecture=MODERN | {"rotary_percentage": 0.5}, trainer={"train_iterations": 0})
    run_training(tmp_path / "strange", strange)
    with pytest.raises(SwarmtrainError, match=r"closest is llama, for which rotary_percentage must be 1.0, not 0.5"):
        export_checkpoint(tmp_path / "strange" / "run", tmp_path / "out", dtype=None, shard_bytes=GIB)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def _load_newest_model(folder: Path, config: dict[str, Any]) -> Transformer:
    """Return the model of a run's newest checkpoint."""
    shape = TransformerArchitectureConfig.model_validate_json(json.dumps(config["transformer_architecture"]))
    model = Transformer(shape, 0).init_weights()
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    path = folder / "run" / "step-00000002"
    load_tensors(tensors, path, manifests.read_manifest(path), is_collective=False)
    return model.eval()


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tensor": {"model_parallel_size": 2},
    "pipe": {"pipe_parallel_size": 2},
    "fsdp": {"data_parallel_type": "fsdp"},
}


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "qwen2"])
def test_initialized_from_an_export_it_is_the_same_model(
    trained_runs: dict[str, tuple[Path, dict[str, Any]]], name: str, tmp_path: Path
) -> None:
    folder, config = trained_runs[name]
    given = tmp_path / "out"
    export_checkpoint(folder / "run", given, dtype=None, shard_bytes=20_000)
    own = merge_config(config, trainer={"init_from": str(given), "train_iterations": 1})
    run_training(tmp_path / "none", merge_config(own, trainer={"train_iterations": 0}))
    export_checkpoint(tmp_path / "none" / "run", tmp_path / "again", dtype=None, shard_bytes=20_000)
    assert {path.name: path.read_bytes() for path in given.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()
    }
    [alone] = run_training(tmp_path / "alone", own).values()
    [noise] = run_training(tmp_path / "noise", merge_config(own, trainer={"init_from": None})).values()
    assert abs(alone - noise) > 0.01
    for kind, topology in TOPOLOGIES.items() if name == "gpt2" else [("tensor", TOPOLOGIES["tensor"])]:
        [divided] = run_training(tmp_path / kind, merge_config(own, topology=topology), size=2).values()
        assert divided == pytest.approx(alone, rel=1e-6), kind


def test_an_export_keeps_the_tokenizer_and_the_length_of_its_base_model(
    trained_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, config = trained_runs["qwen2"]
    base = tmp_path / "base"
    export_checkpoint(folder / "run", base, dtype=None, shard_bytes=GIB)
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**values, "max_position_embeddings": 4096}))
    write_tokenizer(base / "tokenizer.json")
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (base / "chat_template.jinja").write_text("{{ messages }}")
    run_training(tmp_path / "run", merge_config(config, trainer={"init_from": str(base), "train_iterations": 0}))
    export_checkpoint(tmp_path / "run" / "run", tmp_path / "out", dtype=None, shard_bytes=GIB)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["max_position_embeddings"], exported["eos_token_id"]) == (4096, 1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    export_checkpoint(tmp_path / "run" / "run", tmp_path / "other", dtype=None, shard_bytes=GIB, tokenizer=base)
    assert (tmp_path / "other" / "chat_template.jinja").exists()


def test_a_killed_export_is_not_in_the_way(trained_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    export_checkpoint(trained_runs["llama"][0] / "run", tmp_path / "out", dtype=None, shard_bytes=GIB)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_masks_that_were_saved_as_booleans_are_skipped(trained_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    """Older files of GPT-NeoX and GPT-2 have them."""
    folder, config = trained_runs["gpt_neox"]
    given = tmp_path / "out"
    export_checkpoint(folder / "run", given, dtype=None, shard_bytes=GIB)
    file = given / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
    safetensors.torch.save_file(tensors, file)
    own = TransformerArchitectureConfig.model_validate_json(json.dumps(config["transformer_architecture"]))
    sizes = {name: parameter.shape for name, parameter in Transformer(own, 0).named_parameters()}
    value = pretrained.build_parameter_loader(given, own, sizes)
    assert torch.equal(value("embedding.weight", sizes["embedding.weight"]), tensors["gpt_neox.embed_in.weight"])
    with pytest.raises(IncompatibleCheckpoint, match=r"umup\.enable is False in the checkpoint and True in the config"):
        pretrained.build_parameter_loader(given, own.model_copy(update={"umup": own.umup.model_copy(update={"enable": True})}), sizes)


def test_another_model_is_refused(trained_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    folder, config = trained_runs["llama"]
    given = tmp_path / "out"
    export_checkpoint(folder / "run", given, dtype=None, shard_bytes=GIB)
    own = TransformerArchitectureConfig.model_validate_json(json.dumps(config["transformer_architecture"]))
    sizes = {name: parameter.shape for name, parameter in Transformer(own, 0).named_parameters()}
    wider = own.model_copy(update={"mlp_factor": 3.0, "num_layers": 3})
    with pytest.raises(
        IncompatibleCheckpoint,
        match=r"num_layers is 2 in the checkpoint and 3 in the config; mlp_factor x hidden_size is 88 in the checkpoint and 96 in",
    ):
        pretrained.build_parameter_loader(given, wider, sizes)
    whole = (given / "model.safetensors").read_bytes()
    (given / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        pretrained.build_parameter_loader(given, own, sizes)
    renamed = whole.replace(b"model.norm.weight", b"model.morn.weight")
    (given / "model.safetensors").write_bytes(renamed)
    with pytest.raises(IncompatibleCheckpoint, match=r"model.norm.weight is missing; model.morn.weight is unexpected"):
        pretrained.build_parameter_loader(given, own, sizes)
    (given / "model.safetensors").rename(given / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="has only pickle files"):
        pretrained.build_parameter_loader(given, own, sizes)
