"""Whatever validates makes a step in every world that it fits, or is refused in words: no traceback of ours, no hang.

Steps are rehearsed: they run the code that trains, as any rank of any world, without a process for each.
SWARMTRAIN_FUZZ=N tries N other configs instead of the same few dozen.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.memory.rehearsal import rehearse

FUZZ = os.environ.get("SWARMTRAIN_FUZZ")
# Of each section what is always there, small, and of what else there is any part.
SECTIONS: dict[str, tuple[dict[str, list[Any]], dict[str, list[Any]]]] = {
    "topology": (
        {"global_batch_size": [1, 2, 4, 6], "micro_batch_size": [1, 2]},
        {
            "model_parallel_size": [1, 2, 4],
            "sequence_parallel": [False, True],
            "pipe_parallel_size": [1, 2, 3],
            "pipe_stages_per_rank": [1, 2],
            "pipe_partition_method": ["uniform", "balanced"],
            "context_parallel_size": [1, 2],
            "data_parallel_type": ["ddp", "fsdp", "hsdp"],
            "data_parallel_shard_size": [None, 2],
            "reduce_every_micro_batch": [False, True],
            "cpu_offload": [False, True],
            "activation_checkpointing_type": ["disabled", "selective", "every_layer", "every_pipe_stage"],
        },
    ),
    "transformer_architecture": (
        {"vocab_size": [8, 17, 32], "hidden_size": [8, 16, 24], "num_layers": [1, 2, 3, 4], "sequence_length": [4, 7, 8]},
        {
            "num_attention_heads": [1, 2, 4],
            "attention_num_kv_heads": [None, 1, 2],
            "attention_bias": [False, True],
            "attention_head_size": [None, 6],
            "learned_positions": [False, True],
            "lora_config": [None, {"rank": 2, "dropout": 0.1, "layers": ["key", "output", "down"]}],
            "parallel_residual": [False, True],
            "rotary_scaling": [None, {}],
            "key_query_norm": [False, True],
            "num_local_attention_heads": [0, 2],
            "local_attention_window_size": [None, 3],
            "rotary_percentage": [0.0, 0.5, 1.0],
            "norm_type": ["layernorm", "rms"],
            "mlp_type": ["default", "swiglu"],
            "mlp_factor": [0.5, 1.0, 2.7],
            "weight_tying": [False, True],
            "reset_attention_mask": [False, True],
            "reset_position_ids": [False, True],
            "dropout_embedding": [0.0, 0.1],
            "dropout_attention_probs": [0.0, 0.1],
            "precision": ["float32", "bfloat16", "float16", "float64"],
        },
    ),
    "optimizer": (
        {},
        {
            "method": ["adamw", "sgd", "muon"],
            "zero": [False, True],
            "gradient_clipping": [0.0, 1.0],
            "state_precision": ["float32", "bfloat16"],
        },
    ),
}


def section(always: dict[str, list[Any]], perhaps: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in always.items()},
        optional={name: st.sampled_from(values) for name, values in perhaps.items()},
    )


CONFIGS = st.fixed_dictionaries({name: section(*fields) for name, fields in SECTIONS.items()})


@settings(
    max_examples=int(FUZZ or 40),
    derandomize=FUZZ is None,
    phases=[Phase.generate],  # to make a failing config smaller takes minutes, and says little more
    suppress_health_check=list(HealthCheck),
)
@given(CONFIGS, st.sampled_from([None, None, {}, {"proj_layers": [6, 5], "pooling": "last_token"}]), st.integers(1, 4), st.integers(0, 3))
def test_what_validates_makes_a_step_or_is_refused_in_words(
    values: dict[str, Any], vectors: dict[str, Any] | None, size: int, place: int
) -> None:
    if vectors is not None:
        values["transformer_architecture"]["embedding_head_config"] = vectors
        values |= {"trainer": {"contrastive_config": {}}, "data": {f"{name}_prefixes": ["a"] for name in ("data", "positive", "negative")}}
    refusal = refused(values, size, place % size)
    assert refusal is None or (refusal.place and refusal.hint)


def refused(values: dict[str, Any], size: int, rank: int) -> SwarmtrainError | None:
    """Make a step of `rank`, if the config is one; return why it is not to be made."""
    try:
        config = Config.model_validate_json(json.dumps(values))
        rehearse(config, size, rank)
    except ValidationError:
        return None
    except SwarmtrainError as error:
        return error
    return None
