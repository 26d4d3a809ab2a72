"""GPT-NeoX and Pythia."""

from __future__ import annotations

from swarmtrain.config.families.family import (
    ACTIVATIONS,
    COMMON_MAPPINGS,
    FUSED_QKV,
    GPT_FIXED_VALUES,
    FieldMapping,
    ModelFamily,
    TensorNames,
    export_activation,
)

GPT_NEOX = ModelFamily(
    model_type="gpt_neox",
    model_class="GPTNeoXForCausalLM",
    field_mappings=(
        *COMMON_MAPPINGS,
        FieldMapping("rotary_emb_base", "rotary_embedding_base"),
        FieldMapping("rotary_pct", "rotary_percentage"),
        FieldMapping("layer_norm_eps", "layernorm.layernorm_epsilon"),
        FieldMapping("attention_bias", "attention_bias"),
        FieldMapping("use_parallel_residual", "parallel_residual"),
        FieldMapping("hidden_act", "activation_function", to_hf=export_activation, from_hf=lambda name, _: ACTIVATIONS[name]),
        FieldMapping("hidden_dropout", "dropout_after_attention"),
        FieldMapping("hidden_dropout", "dropout_after_mlp"),
    ),
    fixed_values={**GPT_FIXED_VALUES, "relative_position_embedding_type": "rotary"},
    required_values={"hidden_act": tuple(ACTIVATIONS), "quantization_config": None},
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    tensor_names=TensorNames(
        {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        "gpt_neox.layers",
        {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            **{f"attention.{one}": "attention.query_key_value" for one in FUSED_QKV},
            "attention.output": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        interleaves_heads=True,
    ),
    rotary_keys=("rotary_emb_base", "rotary_pct"),
)
