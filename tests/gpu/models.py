"""Configs of the models that are measured: on a GPU of realistic size, on the CPU tiny ones."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from typing import Any

import torch

from swarmtrain.config import Config

Sections = Mapping[str, Mapping[str, Any]]
"""The values of a config, by section and key."""

_STEPS = 1_000_000  # the learning rate is constant, so this has no effect
TINY: Sections = {
    "transformer_architecture": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "sequence_length": 128,
        "norm_type": "rms",
        "mlp_type": "swiglu",
        "mlp_factor": 2.75,
        "weight_tying": False,
        "precision": "bfloat16",
    },
    "topology": {"global_batch_size": 4, "micro_batch_size": 4},
    "learning_rate_scheduler": {"learning_rate": 1e-4},
    "trainer": {"train_iterations": _STEPS, "deterministic": "ignore", "compile": False},
}
"""A Llama-like model that trains in milliseconds on a CPU."""
MODEL_1B: Sections = {
    **TINY,
    "transformer_architecture": {
        **TINY["transformer_architecture"],
        "vocab_size": 50304,
        "hidden_size": 2048,
        "num_layers": 20,
        "num_attention_heads": 16,
        "sequence_length": 4096,
    },
}
"""A Llama-like model of 1.2 billion parameters, with 16,384 tokens per step."""
SLICE_8B: Sections = {
    **MODEL_1B,
    "transformer_architecture": {
        **MODEL_1B["transformer_architecture"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_layers": 8,
        "num_attention_heads": 32,
        "attention_num_kv_heads": 8,
        "mlp_factor": 3.5,
    },
    "topology": {"global_batch_size": 2, "micro_batch_size": 2, "activation_checkpointing_type": "selective"},
}
"""Eight of the 32 layers of Llama 3 8B, with its vocabulary."""
DOCUMENTS: Sections = {"transformer_architecture": {"reset_attention_mask": True, "reset_position_ids": True}}
"""Packed documents that do not attend to each other."""
COMPILE: Sections = {"trainer": {"compile": True}}
FLOAT8: Sections = {
    "transformer_architecture": {
        "precision": "bfloat16",
        "fp8_config_attention": {},
        "fp8_config_attention_dense_out": {},
        "fp8_config_mlp": {},
        "fp8_config_mlp_dense_out": {},
    }
}


def merge_sections(*sections: Sections) -> dict[str, dict[str, Any]]:
    """Return the values of all `sections`; later ones replace earlier ones."""
    merged: dict[str, dict[str, Any]] = {}
    for values in sections:
        for section, keys in values.items():
            merged[section] = {**merged.get(section, {}), **keys}
    return merged


def build_config(sections: Sections) -> Config:
    """Return the config with the values of `sections`, and defaults for all others."""
    return Config.from_json(json.dumps(sections))


def free_device_memory() -> None:
    """Free the memory of earlier sessions of this process, and start a new maximum of the allocated memory."""
    gc.collect()  # a model is part of reference cycles
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
