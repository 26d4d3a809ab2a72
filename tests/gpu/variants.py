"""The configs whose losses are compared with those of a reference (see rows_equivalence)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models import COMPILE, DOCUMENTS, FLOAT8, Sections, merge_sections

_FLOAT32_TOLERANCE, _BFLOAT16_TOLERANCE, _FLOAT8_TOLERANCE = 1e-5, 2e-3, 1e-2
_DPO_TOLERANCE = 1e-2
"""The loss compares log-probabilities of whole samples, and so the sums of their rounding errors."""
_CONTRASTIVE_TOLERANCE = 5e-2
"""The similarities are divided by the temperature, and so are their rounding errors."""
BASE: Sections = {
    "topology": {"global_batch_size": 4, "micro_batch_size": 2},
    "learning_rate_scheduler": {"learning_rate": 1e-3},
    "trainer": {"train_iterations": 100, "deterministic": "ignore", "compile": False},
}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"vocab_size": 1024, "hidden_size": 256, "num_layers": 4, "num_attention_heads": 4, "sequence_length": 512},
    "cpu": {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 64},
}
"""The model's size, by the type of the device."""
_ROWWISE: Mapping[str, Any] = {name: {"scaling": "rowwise"} for name in FLOAT8["transformer_architecture"] if name.startswith("fp8")}
_WINDOW: Mapping[str, Any] = {"num_local_attention_heads": 4, "local_attention_window_size": 32}
_FLEX: Sections = {"trainer": {"attention_kernel": "flex"}}
_LORA: Mapping[str, Any] = {"lora_config": {"rank": 4}, "weight_tying": False}


@dataclass(frozen=True)
class Variant:
    """A config to check: `model` is also used for the reference, `numerics` is not, as it must not change the result."""

    name: str
    model: Sections = field(default_factory=dict)
    numerics: Sections = field(default_factory=dict)
    tolerance: float | None = _BFLOAT16_TOLERANCE
    """Relative tolerance of the loss; None if the reference draws other random numbers, so that both are only similar."""
    needs_gpu: bool = False


def _architecture(**values: object) -> Sections:
    return {"transformer_architecture": values}


def _topology(**values: object) -> Sections:
    return {"topology": values}


def _bfloat16(*sections: Sections) -> Sections:
    return merge_sections(_architecture(precision="bfloat16"), *sections)


VARIANTS = (
    Variant("float32", tolerance=_FLOAT32_TOLERANCE),
    Variant("bfloat16", numerics=_bfloat16()),
    Variant("float16, loss scaling", numerics=_architecture(precision="float16")),
    Variant("float8, tensorwise", numerics=FLOAT8, tolerance=_FLOAT8_TOLERANCE, needs_gpu=True),
    Variant("float8, rowwise", numerics=_bfloat16(_architecture(**_ROWWISE)), tolerance=_FLOAT8_TOLERANCE, needs_gpu=True),
    Variant("RMSNorm, SwiGLU", _architecture(norm_type="rms", mlp_type="swiglu", mlp_factor=2.0), _bfloat16()),
    Variant(
        "GPT-2: biases, learned positions",
        _architecture(learned_positions=True, relative_position_embedding_type="none", attention_bias=True, mlp_bias=True),
        _bfloat16(),
    ),
    Variant("grouped-query attention", _architecture(attention_num_kv_heads=2), _bfloat16()),
    Variant("grouped-query attention, float32", _architecture(attention_num_kv_heads=2), tolerance=_FLOAT32_TOLERANCE),
    Variant("QK norm", _architecture(key_query_norm=True), _bfloat16()),
    Variant("sliding window", _architecture(**_WINDOW), _bfloat16()),
    Variant("window in half of the heads", _architecture(num_local_attention_heads=2, local_attention_window_size=32), _bfloat16()),
    Variant(
        "window in every second layer",
        _architecture(**_WINDOW, local_attention_layers=[True, False]),
        _bfloat16(),
    ),
    Variant("window, grouped-query attention", _architecture(**_WINDOW, attention_num_kv_heads=2), _bfloat16()),
    Variant("window and documents", merge_sections(DOCUMENTS, _architecture(**_WINDOW)), _bfloat16()),
    Variant("window and documents, flex attention", merge_sections(DOCUMENTS, _architecture(**_WINDOW)), _bfloat16(_FLEX), needs_gpu=True),
    Variant("documents, dense masks", DOCUMENTS, _bfloat16({"trainer": {"attention_kernel": "dense"}})),
    Variant("soft-capping", _architecture(attention_softcap=20.0, logit_softcap=30.0), _bfloat16()),
    Variant("soft-capping, flex attention", _architecture(**_WINDOW, attention_softcap=20.0), _bfloat16(_FLEX), needs_gpu=True),
    Variant("documents", DOCUMENTS, _bfloat16()),
    Variant("documents, float32", DOCUMENTS, tolerance=_FLOAT32_TOLERANCE),
    Variant("dropout", _architecture(dropout_embedding=0.1, dropout_after_attention=0.1, dropout_after_mlp=0.1), _bfloat16()),
    Variant("dropout of attention weights", _architecture(dropout_attention_probs=0.1), _bfloat16(), tolerance=None),
    Variant("LoRA", _architecture(**_LORA), _bfloat16()),
    Variant(
        "DPO",
        {
            **_architecture(**_LORA),
            "trainer": {"preference_config": {}},
            "data": {"data_prefixes": ["none"], "rejected_prefixes": ["none"]},
        },
        _bfloat16(),
        tolerance=_DPO_TOLERANCE,
    ),
    Variant(
        "contrastive",
        {
            **_architecture(embedding_head_config={}),
            "trainer": {"contrastive_config": {}},
            "data": {"data_prefixes": ["none"], "positive_prefixes": ["none"]},
        },
        _bfloat16(),
        tolerance=_CONTRASTIVE_TOLERANCE,
    ),
    Variant("u-muP", {**_architecture(umup={"enable": True}, weight_tying=False), "optimizer": {"gradient_clipping": 0}}, _bfloat16()),
    Variant("Muon", {"optimizer": {"method": "muon"}}, _bfloat16()),
    Variant("bfloat16 optimizer state", numerics=_bfloat16({"optimizer": {"state_precision": "bfloat16"}})),
    Variant("selective recomputation", numerics=_bfloat16(_topology(activation_checkpointing_type="selective"))),
    Variant("recomputation of every layer", numerics=_bfloat16(_topology(activation_checkpointing_type="every_layer"))),
    Variant("FSDP, one rank", numerics=_bfloat16(_topology(data_parallel_type="fsdp"))),
    Variant("ZeRO-1, one rank", numerics=_bfloat16({"optimizer": {"zero": True}})),
    Variant("CPU offload", numerics=_bfloat16(_topology(data_parallel_type="fsdp", cpu_offload=True))),
    Variant("compiled", numerics=_bfloat16(COMPILE)),
    Variant("compiled, documents", DOCUMENTS, _bfloat16(COMPILE), needs_gpu=True),
    Variant(
        "compiled, selective recomputation",
        numerics=_bfloat16(COMPILE, _topology(activation_checkpointing_type="selective")),
        needs_gpu=True,
    ),
    Variant("compiled, float8", numerics=merge_sections(FLOAT8, COMPILE), tolerance=_FLOAT8_TOLERANCE, needs_gpu=True),
)
