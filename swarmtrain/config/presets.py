"""Presets: the architectures of well-known models, taken from their config.json, with sequence lengths for training."""

from __future__ import annotations

from typing import Any

from swarmtrain.config.huggingface_config import read_architecture
from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig
from swarmtrain.errors import SwarmtrainError


def _build_gpt2_config_json(hidden_size: int, layers: int, heads: int) -> dict[str, Any]:
    # GPT-2's dropout is disabled: pretraining without dropout is now usual.
    dropouts = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    sizes = {"n_embd": hidden_size, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", **sizes, **dropouts}


def _build_pythia_config_json(hidden_size: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
    }


def _build_llama_like_config_json(
    model_type: str, sizes: tuple[int, int, int, int, int], vocab_size: int, rope_theta: float, **extra_values: Any
) -> dict[str, Any]:
    hidden, width, layers, heads, kv_heads = sizes
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "rope_theta": rope_theta,
        "rms_norm_eps": 1e-5 if model_type in ("llama", "mistral") else 1e-6,
        **extra_values,
    }


def _build_llama3_config_json(
    hidden_size: int, mlp_width: int, layers: int, heads: int, *, rope_scaling_factor: float, tied: bool = False
) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": rope_scaling_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _build_llama_like_config_json(
        "llama", (hidden_size, mlp_width, layers, heads, 8), 128256, 500000.0, rope_scaling=scaling, tie_word_embeddings=tied
    )


_TIED_EMBEDDINGS = {"tie_word_embeddings": True}
_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _build_gpt2_config_json(768, 12, 12),
    "gpt2-medium": _build_gpt2_config_json(1024, 24, 16),
    "gpt2-large": _build_gpt2_config_json(1280, 36, 20),
    "gpt2-xl": _build_gpt2_config_json(1600, 48, 25),
    "pythia-70m": _build_pythia_config_json(512, 6, 8),
    "pythia-160m": _build_pythia_config_json(768, 12, 12),
    "pythia-410m": _build_pythia_config_json(1024, 24, 16),
    "pythia-1b": _build_pythia_config_json(2048, 16, 8),
    "pythia-1.4b": _build_pythia_config_json(2048, 24, 16),
    "llama-3.2-1b": _build_llama3_config_json(2048, 8192, 16, 32, rope_scaling_factor=32.0, tied=True),
    "llama-3.2-3b": _build_llama3_config_json(3072, 8192, 28, 24, rope_scaling_factor=32.0, tied=True),
    "llama-3.1-8b": _build_llama3_config_json(4096, 14336, 32, 32, rope_scaling_factor=8.0),
    "llama-3.1-70b": _build_llama3_config_json(8192, 28672, 80, 64, rope_scaling_factor=8.0),
    "mistral-7b-v0.3": _build_llama_like_config_json("mistral", (4096, 14336, 32, 32, 8), 32768, 1e6),
    "qwen2.5-0.5b": _build_llama_like_config_json("qwen2", (896, 4864, 24, 14, 2), 151936, 1e6, **_TIED_EMBEDDINGS),
    "qwen2.5-1.5b": _build_llama_like_config_json("qwen2", (1536, 8960, 28, 12, 2), 151936, 1e6, **_TIED_EMBEDDINGS),
    "qwen2.5-7b": _build_llama_like_config_json("qwen2", (3584, 18944, 28, 28, 4), 152064, 1e6),
    "qwen3-0.6b": _build_llama_like_config_json("qwen3", (1024, 3072, 28, 16, 8), 151936, 1e6, **_TIED_EMBEDDINGS),
    "qwen3-1.7b": _build_llama_like_config_json("qwen3", (2048, 6144, 28, 16, 8), 151936, 1e6, **_TIED_EMBEDDINGS),
    "qwen3-4b": _build_llama_like_config_json("qwen3", (2560, 9728, 36, 32, 8), 151936, 1e6, **_TIED_EMBEDDINGS),
    "qwen3-8b": _build_llama_like_config_json("qwen3", (4096, 12288, 36, 32, 8), 151936, 1e6),
}
PRESET_NAMES = tuple(_PRESETS)


def load_preset(name: str) -> TransformerArchitectureConfig:
    """Return the architecture of the preset `name`, with precision bfloat16. Raises SwarmtrainError if it is unknown."""
    if name not in _PRESETS:
        raise SwarmtrainError(f"there is no preset {name!r}", place="--preset", hint=f"available presets: {', '.join(PRESET_NAMES)}")
    architecture = read_architecture(_PRESETS[name], name)
    return architecture.model_copy(update={"precision": Precision.bfloat16})
