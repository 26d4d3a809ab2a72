"""A config that validates makes an optimizer step in every world that it fits, or is refused with a place and a hint.

The step is simulated: the training code runs as any rank of any world, without a process for each rank.
SWARMTRAIN_EXAMPLES=N tries N configs, see tests/randomized.py.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError
from randomized import SEED, count_examples, run_numbered

from swarmtrain.config import Config
from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.memory.simulation import simulate_memory_peaks

Random = random.Random
Values = dict[str, Any]
EXAMPLES = 220
PARTS = 4
"""Number of tests that share the examples, so that none of them takes minutes on a busy machine. The gate runs the first."""
MIN_STEPS, STEPS_OF_A_SEED = 200, 160
"""Minimum number of EXAMPLES that must validate and make a step: of the fixed examples, and of those of any seed."""

# Independent draws: most combinations are invalid.
INDEPENDENT_KEYS: dict[str, tuple[dict[str, list[Any]], dict[str, list[Any]]]] = {
    "topology": (
        {"global_batch_size": [1, 2, 4, 6], "micro_batch_size": [1, 2]},
        {
            "model_parallel_size": [1, 2, 4],
            "sequence_parallel": [False, True],
            "pipe_parallel_size": [1, 2, 3],
            "pipe_stages_per_rank": [1, 2],
            "context_parallel_size": [1, 2],
            "data_parallel_type": ["ddp", "fsdp", "hsdp"],
            "data_parallel_shard_size": [None, 2],
            "reduce_every_micro_batch": [False, True],
            "cpu_offload": [False, True],
            "activation_checkpointing_type": ["disabled", "selective", "every_layer", "every_pipe_stage"],
            "micro_batch_assignment": ["equal", "by_speed"],
        },
    ),
    "transformer_architecture": (
        {"vocab_size": [8, 17, 32], "hidden_size": [8, 16, 24], "num_layers": [1, 2, 3, 4], "sequence_length": [4, 7, 8]},
        {
            "num_attention_heads": [1, 2, 4],
            "attention_num_kv_heads": [None, 1, 2],
            "attention_head_size": [None, 6],
            "learned_positions": [False, True],
            "num_local_attention_heads": [0, 2],
            "local_attention_window_size": [None, 3],
            "local_attention_layers": [None, [True, False], [False]],
            "rotary_percentage": [0.0, 0.5, 1.0],
            "mlp_factor": [0.5, 1.0, 2.7],
            "lora_config": [None, {"layers": ["gate"]}],
            "umup": [{"enable": True}],
            "weight_tying": [False, True],
        },
    ),
    "optimizer": ({}, {"method": ["adamw", "sgd", "muon"], "zero": [False, True]}),
}


def draw_unrelated(rng: Random) -> Values:
    """Return a config whose values do not depend on each other."""
    return {
        name: {key: pick_value(rng, *values) for key, values in always.items()}
        | {key: pick_value(rng, *values) for key, values in optional.items() if pick_value(rng, False, True)}
        for name, (always, optional) in INDEPENDENT_KEYS.items()
    }


def draw_job(rng: Random) -> tuple[Values, int, int]:
    """Return a config, a world size and a rank. Of 100 configs, 96 are valid by construction."""
    if rng.random() < 0.04:
        size = rng.randint(1, 4)
        return draw_unrelated(rng), size, rng.randrange(size)
    objective = pick_value(rng, *["language_model"] * 4, "contrastive", "preference")
    topology = draw_topology(rng, whole_sequences=objective != "language_model")
    values = {"topology": topology, "transformer_architecture": draw_architecture(rng, topology)}
    values |= {"optimizer": draw_optimizer(rng), "trainer": {}}
    add_objective(rng, values, objective)
    add_training_groups(rng, values)
    add_learners(rng, values)
    replica = topology["model_parallel_size"] * topology["pipe_parallel_size"] * topology["context_parallel_size"]
    size = replica * pick_value(rng, *([2, 4] if topology["data_parallel_type"] == "hsdp" else [1, 2, 3]))
    return values, size, rng.randrange(size)


def draw_topology(rng: Random, *, whole_sequences: bool) -> Values:
    """Return a topology; small ones are more frequent, as their steps are simulated faster. `whole_sequences`: no context parallelism."""
    pipe = pick_value(rng, *[1] * 9, 2, 2, 3)
    data = pick_value(rng, "ddp", "fsdp", "hsdp")
    micro, rounds = pick_value(rng, 1, 2), pick_value(rng, *[1] * 5, 2)
    topology = {
        "model_parallel_size": pick_value(rng, *[1] * 9, 2, 2, 4),
        "sequence_parallel": pick_value(rng, False, False, True),
        "pipe_parallel_size": pipe,
        "context_parallel_size": 1 if whole_sequences else pick_value(rng, 1, 1, 1, 2),
        "data_parallel_type": data,
        "micro_batch_size": micro,
        "global_batch_size": micro * rounds * pipe,
        "pipe_stages_per_rank": pick_value(rng, 1, 1, 2) if pipe > 1 else 1,
        "pipe_partition_method": pick_value(rng, "uniform", "balanced"),
        "activation_checkpointing_type": pick_value(
            rng, "disabled", "selective", "every_layer", *(["every_pipe_stage"] if pipe > 1 else [])
        ),
    }
    if data == "hsdp":
        topology["data_parallel_shard_size"] = 2
    if data != "ddp":
        topology["cpu_offload"] = pick_value(rng, False, True)
        topology["reduce_every_micro_batch"] = pipe == 1 and pick_value(rng, False, True)
    return topology


def draw_architecture(rng: Random, topology: Values) -> Values:
    """Return a model whose sizes are multiples of what `topology` divides them by."""
    tensor, stages = topology["model_parallel_size"], topology["pipe_parallel_size"] * topology["pipe_stages_per_rank"]
    heads_per_group, groups = pick_value(rng, 1, 2), tensor * pick_value(rng, 1, 2)
    heads, width = heads_per_group * groups, pick_value(rng, 4, 6)
    hidden = heads * width if pick_value(rng, True, False) else 8 * pick_value(rng, 1, 2)
    length_multiple = 2 * topology["context_parallel_size"] * tensor
    divided = topology["sequence_parallel"] or topology["context_parallel_size"] > 1
    shape = {
        "vocab_size": tensor * pick_value(rng, 4, 5, 8),
        "hidden_size": hidden,
        "num_layers": stages + pick_value(rng, *[0] * 5, 1),
        "sequence_length": length_multiple * pick_value(rng, 1, 2) if divided else pick_value(rng, 4, 7, 8),
        "num_attention_heads": heads,
        "attention_num_kv_heads": pick_value(rng, groups, None),
        "attention_head_size": width,
        "mlp_factor": pick_value(
            rng, *[factor for factor in (0.5, 1.0, 2.0, 2.7) if int(hidden * factor) and int(hidden * factor) % tensor == 0]
        ),
        **draw_positions(rng, width),
        **draw_blocks(rng),
    }
    if pick_value(rng, False, False, True):
        local = heads_per_group if shape["attention_num_kv_heads"] else 1
        shape |= {"num_local_attention_heads": local, "local_attention_window_size": pick_value(rng, 1, 3)}
        shape["local_attention_layers"] = pick_value(rng, None, [True, False], [True])
    shape |= {"attention_softcap": pick_value(rng, None, None, 5.0), "logit_softcap": pick_value(rng, None, None, 5.0)}
    return shape


def draw_positions(rng: Random, width: int) -> Values:
    """Return the position encoding of a model with heads of `width` dimensions."""
    kind = pick_value(rng, "rotary", "rotary", "rotary_complex", "none")
    positions: Values = {
        "relative_position_embedding_type": kind,
        "learned_positions": pick_value(rng, False, True),
        "reset_attention_mask": pick_value(rng, False, True),
        "reset_position_ids": pick_value(rng, False, True),
    }
    if kind != "none":
        positions |= {
            "rotary_scaling": pick_value(rng, None, {}),
            "rotary_percentage": pick_value(rng, 1.0, 0.5) if width % 4 == 0 else 1.0,
        }
    return positions


def draw_blocks(rng: Random) -> Values:
    """Return the config keys of a model's blocks."""
    mlp, norm = pick_value(rng, "default", "swiglu"), pick_value(rng, "layernorm", "rms")
    names = ("attention_bias", "mlp_bias", "key_query_norm", "parallel_residual", "weight_tying")
    return {
        **{name: pick_value(rng, False, True) for name in names},
        "attention_output_bias": pick_value(rng, None, False, True),
        "mlp_type": mlp,
        "activation_function": pick_value(rng, "gelu", "gelu_tanh") if mlp == "default" else "gelu",
        "norm_type": norm,
        "layernorm": {"layernorm_bias": norm == "layernorm" and pick_value(rng, False, True)},
        "dropout_embedding": pick_value(rng, 0.0, 0.1),
        "dropout_attention_probs": pick_value(rng, 0.0, 0.1),
        "dropout_after_attention": pick_value(rng, 0.0, 0.1),
        "dropout_after_mlp": pick_value(rng, 0.0, 0.1),
        "precision": pick_value(rng, "float32", "bfloat16", "float16", "float64"),
    }


def draw_optimizer(rng: Random) -> Values:
    return {
        "method": pick_value(rng, *["adamw"] * 3, *["sgd"] * 3, "muon"),
        "zero": pick_value(rng, False, True),
        "gradient_clipping": pick_value(rng, 0.0, 1.0),
        "state_precision": pick_value(rng, "float32", "bfloat16"),
    }


def add_objective(rng: Random, values: Values, objective: str) -> None:
    """Set the training objective and, in some configs, which part of the model is trained."""
    shape, trainer = values["transformer_architecture"], values["trainer"]
    lora = {"rank": 2, "dropout": 0.1, "layers": ["key", "output", "down", *(["gate"] if shape["mlp_type"] == "swiglu" else [])]}
    adapter = pick_value(rng, {"lora_config": lora}, {"adapter_config": {}})
    if objective == "preference":
        shape |= adapter
        trainer["preference_config"] = {}
        values["data"] = {"data_prefixes": ["a"], "rejected_prefixes": ["b"]}
    elif objective == "contrastive":
        shape["embedding_head_config"] = pick_value(rng, {}, {"proj_layers": [6, 5], "pooling": "last_token"}, {"pooling": "mean"})
        shape["logit_softcap"] = None
        trainer["contrastive_config"] = {"query_side_only": pick_value(rng, False, True)}
        values["data"] = {f"{name}_prefixes": ["a"] for name in ("data", "positive", "negative")}
    else:
        trainer["loss_chunk_size"] = pick_value(rng, 2048, 3)
        tokens = "none" if values["topology"]["pipe_parallel_size"] > 1 else "tokens"  # a stage without an embedding would train nothing
        extra = pick_value(rng, "none", "none", "beside", tokens, "patterns", "umup")
        if extra == "beside":
            shape |= adapter
        elif extra == "tokens":
            trainer["finetunable_token_ids"] = [0, 2]
        elif extra == "patterns":
            trainer["finetunable_parameters"] = ["norm"]
        elif extra == "umup":
            shape |= {"umup": {"enable": True}, "weight_tying": False, "learned_positions": False, "parallel_residual": False}
            shape |= {"attention_softcap": None, "logit_softcap": None}
            values["optimizer"] |= {"method": "adamw", "gradient_clipping": 0.0}


def add_training_groups(rng: Random, values: Values) -> None:
    """Put the norms into their own training group, in some configs that train all parameters."""
    shape, trainer = values["transformer_architecture"], values["trainer"]
    frozen = {"lora_config", "adapter_config", "finetunable_token_ids", "finetunable_parameters"} & {*shape, *trainer}
    if not frozen and pick_value(rng, False, False, True):
        values["training_groups"] = [
            {"group_name": "norms", "parameters_include": ["norm"], "weight_decay": 0.0},
            {"group_name": "others", "parameters_exclude": ["norm"], "weight_decay": 0.1},
        ]


def add_learners(rng: Random, values: Values) -> None:
    """Train with learners (DiLoCo), in some of the configs that support them."""
    topology = values["topology"]
    is_supported = (
        topology["pipe_parallel_size"] == topology["context_parallel_size"] == 1 and "contrastive_config" not in values["trainer"]
    )
    if not is_supported or not pick_value(rng, *[False] * 5, True):
        return
    learners = pick_value(rng, 1, 2)
    topology |= {"learners": learners, "cpu_offload": False, "global_batch_size": learners * topology["global_batch_size"]}
    values["diloco"] = {
        "inner_steps": 4,
        "quantization": pick_value(rng, "none", "int8", "int4"),
        "fragments": pick_value(rng, 1, min(2, values["transformer_architecture"]["num_layers"])),
        "overlap": pick_value(rng, 0, 1),
    }


def pick_value(rng: Random, *values: Any) -> Any:
    return rng.choice(values)


def try_config(values: Values, size: int, rank: int) -> str:
    """Return the outcome of a config: "invalid", "refused" with a place and a hint, or "made a step"."""
    try:
        config = Config.model_validate_json(json.dumps(values))
    except ValidationError:
        return "invalid"
    refusal = None
    try:
        simulate_memory_peaks(config, size, rank)
    except SwarmtrainError as error:
        refusal = error
    assert refusal is None or (refusal.place and refusal.hint), refusal
    return "refused" if refusal else "made a step"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.test_all_only("more examples")) for part in range(1, PARTS))])
def test_a_config_that_validates_makes_a_step_or_is_refused_with_a_hint(part: int) -> None:
    examples, outcomes = count_examples(EXAMPLES), Counter[str]()

    def check(job: tuple[Values, int, int]) -> None:
        outcomes[try_config(*job)] += 1

    run_numbered(draw_job, check, suite="configs", numbers=range(examples * part // PARTS, examples * (part + 1) // PARTS))
    print(f"{outcomes.total()} configs: {dict(outcomes)}")
    steps = MIN_STEPS if SEED is None else STEPS_OF_A_SEED
    assert outcomes["made a step"] >= steps / PARTS * min(1, examples / EXAMPLES)
    assert outcomes["invalid"] > 0 or examples < EXAMPLES or SEED is not None
