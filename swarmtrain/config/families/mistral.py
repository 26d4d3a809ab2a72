"""Mistral 7B."""

from __future__ import annotations

from swarmtrain.config.families.family import FieldMapping, ModelFamily
from swarmtrain.config.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_FIXED_VALUES,
    LLAMA_MAPPINGS,
    LLAMA_REQUIRED_VALUES,
    LLAMA_TENSOR_NAMES,
)

_SLIDING_WINDOW_MAPPING = FieldMapping(
    "sliding_window",
    "local_attention_window_size",
    # Hugging Face's window includes the token itself.
    to_hf=lambda architecture: None if architecture.local_attention_window_size is None else architecture.local_attention_window_size + 1,
    from_hf=lambda size, _: None if size is None else size - 1,
)
MISTRAL = ModelFamily(
    model_type="mistral",
    model_class="MistralForCausalLM",
    field_mappings=(*LLAMA_MAPPINGS, _SLIDING_WINDOW_MAPPING),
    fixed_values={**LLAMA_FIXED_VALUES, "attention_bias": False, "mlp_bias": False},
    required_values=LLAMA_REQUIRED_VALUES,
    defaults={
        **LLAMA_DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    tensor_names=LLAMA_TENSOR_NAMES,
    has_sliding_window=True,
)
