"""The config.json of every supported family means what transformers makes of it: the same logits, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some
from test_huggingface import import_model

from swarmtrain.config import huggingface_config
from swarmtrain.errors import IncompatibleCheckpoint, SwarmtrainError

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
BASES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **ROPE},
    "qwen2": {**SIZES, **ROPE},
    "qwen3": {**SIZES, **ROPE},
    "mistral": {**SIZES, **ROPE},
    "gpt_neox": {**SIZES, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPE_CHANGES: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_scaling": None, "rope_theta": 500.0},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LLAMA3, "rope_theta": 700.0},
    {"rope_scaling": {**LLAMA3, "type": "llama3", "rope_theta": 300.0}, "rope_theta": 700.0},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 500.0},
    {"rope_scaling": {"type": "default"}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 700.0, "rope_scaling": None},
    {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, "rope_theta": 1e4, "rope_scaling": None},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_scaling": LLAMA3},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_scaling": {**LLAMA3, "rope_theta": 900.0}},
    {"rope_parameters": LLAMA3},
    {"rope_scaling": {key: value for key, value in LLAMA3.items() if not key.startswith("original")}},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5}},
    {"partial_rotary_factor": 0.5},
]
MODERN_CHANGES: list[dict[str, Any]] = [
    *ROPE_CHANGES,
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 0.1},
    {"num_key_value_heads": None},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"head_dim": 12},
    {"head_dim": None},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"tie_word_embeddings": True},
    {"attention_dropout": 0.5},
    {"use_cache": False},
    {"pretraining_tp": 2},
    {"intermediate_size": 55},
    {"sliding_window": 3},
    {"sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
    {"unknown_key": 3},
]
CHANGES: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), MODERN_CHANGES),
    "gpt_neox": [
        *ROPE_CHANGES,
        {"rotary_emb_base": 500.0},
        {"rotary_pct": 0.5},
        {"rotary_pct": 1.0, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rotary_emb_base": 500.0, "rope_theta": 700.0},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_fast"},
        {"hidden_act": "relu"},
        {"layer_norm_eps": 0.1},
        {"use_parallel_residual": False},
        {"attention_bias": False},
        {"tie_word_embeddings": True},
        {"hidden_dropout": 0.5},
        {"intermediate_size": 55},
    ],
    "gpt2": [
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.1},
        {"n_inner": 55},
        {"n_inner": None},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"add_cross_attention": True},
        {"tie_word_embeddings": False},
        {"resid_pdrop": 0.5},
    ],
}


def write_model(folder: Path, config_json: dict[str, Any]) -> Any:
    """Write a config.json as it is, with the weights of the model that transformers makes of it. Return the model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    model(torch.arange(8)[None])  # transformers notices some mistakes only here
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3, generator=generator)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config_json))
    return model


@pytest.mark.parametrize("family", BASES)
def test_each_setting_gives_the_logits_of_transformers_or_is_refused(tmp_path: Path, family: str) -> None:
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(2))
    refused, results = [], {}
    for number, change in enumerate([{}, *CHANGES[family]]):
        folder = tmp_path / str(number)
        try:
            theirs = write_model(folder, {"model_type": family, **BASES[family], **change})
        except Exception as error:  # noqa: BLE001  # transformers refuses it, too
            refused.append((change, f"by transformers: {error}"))
            continue
        try:
            ours = import_model(folder)
        except SwarmtrainError as error:
            refused.append((change, error.message))
            continue
        with torch.no_grad():
            difference = (ours.double()(tokens) - theirs.double()(tokens).logits).abs().max()
        results[json.dumps(change)] = float(difference)
    assert {change: difference for change, difference in results.items() if not difference < 1e-5} == {}
    print(f"{family}: {len(results)} equal, {len(refused)} refused", *refused, sep="\n  ")
    assert len(refused) <= len(results)


@pytest.mark.parametrize("family", BASES)
@given(data=some.data())
@settings(max_examples=30, deadline=None)
def test_a_missing_key_has_the_default_of_the_family(family: str, data: some.DataObject) -> None:
    mappings = huggingface_config.read_model_family({"model_type": family}, "config.json").field_mappings
    whole = {**transformers.AutoConfig.for_model(family).to_dict(), **BASES[family]}
    keys = sorted({mapping.hf_key for mapping in mappings} & whole.keys())
    kept = data.draw(some.sets(some.sampled_from(keys)))
    config_json = {"model_type": family, **{key: whole[key] for key in kept}}
    values = {key: value for key, value in config_json.items() if key != "model_type"}
    try:
        expected = transformers.AutoConfig.for_model(family, **values).to_dict()
    except Exception:  # noqa: BLE001  # the sizes do not fit together
        return
    ours, theirs = (huggingface_config.read_architecture_values(each, "config.json") for each in (config_json, expected))
    for values in (ours, theirs):
        values["attention_num_kv_heads"] = values.get("attention_num_kv_heads") or values["num_attention_heads"]
    assert ours == theirs


def test_a_head_next_to_tied_embeddings_is_refused_unless_it_is_the_same(tmp_path: Path) -> None:
    """transformers uses the head of the file, and says so."""
    folder = tmp_path / "model"
    model = write_model(folder, {"model_type": "llama", **BASES["llama"], "tie_word_embeddings": True})
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        torch.testing.assert_close(import_model(folder)(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    tensors["lm_head.weight"][0] += 1
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(IncompatibleCheckpoint, match=r"has tied embeddings .*, but its lm_head.weight is another one"):
        import_model(folder)
