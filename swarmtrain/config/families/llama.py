"""Llama 2 and 3, and what the families that are built like it share."""

from __future__ import annotations

from swarmtrain.config.families.family import (
    COMMON_FIXED_VALUES,
    COMMON_MAPPINGS,
    FieldMapping,
    ModelFamily,
    TensorNames,
    normalize_head_size,
)

LLAMA_MAPPINGS = (
    *COMMON_MAPPINGS,
    FieldMapping("rope_theta", "rotary_embedding_base"),
    FieldMapping("num_key_value_heads", "attention_num_kv_heads", to_hf=lambda architecture: architecture.kv_heads),
    FieldMapping("head_dim", "attention_head_size", to_hf=lambda architecture: architecture.head_size, from_hf=normalize_head_size),
    FieldMapping("rms_norm_eps", "layernorm.layernorm_epsilon"),
)
ATTENTION_BIAS_MAPPING = FieldMapping("attention_bias", "attention_bias")
LLAMA_FIXED_VALUES = {
    **COMMON_FIXED_VALUES,
    "relative_position_embedding_type": "rotary",
    "rotary_percentage": 1.0,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "parallel_residual": False,
}
LLAMA_REQUIRED_VALUES = {"hidden_act": "silu", "use_sliding_window": (None, False), "quantization_config": None}
LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
LLAMA_TENSOR_NAMES = TensorNames(
    {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers",
    {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
LLAMA = ModelFamily(
    model_type="llama",
    model_class="LlamaForCausalLM",
    field_mappings=(*LLAMA_MAPPINGS, ATTENTION_BIAS_MAPPING, FieldMapping("mlp_bias", "mlp_bias")),
    fixed_values=LLAMA_FIXED_VALUES,
    required_values=LLAMA_REQUIRED_VALUES,
    defaults=LLAMA_DEFAULTS,
    tensor_names=LLAMA_TENSOR_NAMES,
)
