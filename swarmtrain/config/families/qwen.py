"""Qwen 2, 2.5 and 3."""

from __future__ import annotations

from swarmtrain.config.families.family import ModelFamily
from swarmtrain.config.families.llama import (
    ATTENTION_BIAS_MAPPING,
    LLAMA_DEFAULTS,
    LLAMA_FIXED_VALUES,
    LLAMA_MAPPINGS,
    LLAMA_REQUIRED_VALUES,
    LLAMA_TENSOR_NAMES,
)

_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
QWEN2 = ModelFamily(
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    field_mappings=LLAMA_MAPPINGS,
    fixed_values={**LLAMA_FIXED_VALUES, "attention_bias": True, "mlp_bias": False},
    required_values=LLAMA_REQUIRED_VALUES,
    defaults=_DEFAULTS,
    tensor_names=LLAMA_TENSOR_NAMES,
    output_bias_follows_attention=False,
)
QWEN3 = ModelFamily(
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    field_mappings=(*LLAMA_MAPPINGS, ATTENTION_BIAS_MAPPING),
    fixed_values={**LLAMA_FIXED_VALUES, "key_query_norm": True, "mlp_bias": False},
    required_values=LLAMA_REQUIRED_VALUES,
    defaults={**_DEFAULTS, "head_dim": 128},
    tensor_names=LLAMA_TENSOR_NAMES,
)
