"""GPT-2."""

from __future__ import annotations

from swarmtrain.config.families.family import (
    ACTIVATIONS,
    FUSED_QKV,
    GPT_FIXED_VALUES,
    FieldMapping,
    ModelFamily,
    TensorNames,
    compute_mlp_factor,
    export_activation,
)

GPT2 = ModelFamily(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    field_mappings=(
        FieldMapping("vocab_size", "vocab_size"),
        FieldMapping("n_embd", "hidden_size"),
        FieldMapping("n_layer", "num_layers"),
        FieldMapping("n_head", "num_attention_heads"),
        FieldMapping("n_inner", "mlp_factor", to_hf=lambda architecture: architecture.mlp_width, from_hf=compute_mlp_factor),
        FieldMapping("n_positions", "sequence_length"),
        FieldMapping("tie_word_embeddings", "weight_tying"),
        FieldMapping("layer_norm_epsilon", "layernorm.layernorm_epsilon"),
        FieldMapping("activation_function", "activation_function", to_hf=export_activation, from_hf=lambda name, _: ACTIVATIONS[name]),
        FieldMapping("embd_pdrop", "dropout_embedding"),
        FieldMapping("attn_pdrop", "dropout_attention_probs"),
        FieldMapping("resid_pdrop", "dropout_after_attention"),
        FieldMapping("resid_pdrop", "dropout_after_mlp"),
    ),
    fixed_values={
        **GPT_FIXED_VALUES,
        "relative_position_embedding_type": "none",
        "learned_positions": True,
        "attention_bias": True,
        "parallel_residual": False,
    },
    required_values={
        "activation_function": tuple(ACTIVATIONS),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
        "quantization_config": None,
    },
    defaults={
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    tensor_names=TensorNames(
        {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h",
        {
            "attention_norm": "ln_1",
            "mlp_norm": "ln_2",
            **{f"attention.{one}": "attn.c_attn" for one in FUSED_QKV},
            "attention.output": "attn.c_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        transposes=True,
    ),
)
