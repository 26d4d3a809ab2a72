"""u-muP: values near one at every width, learning rates that follow the width, and the same run under every parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import compute_deviation, merge_config, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import MlpType, NormType, TransformerArchitectureConfig, UmupConfig
from swarmtrain.trainer import Optimizer, Transformer, parallelize, start_runtime

LAYERS = ("query", "key", "value", "output", "gate", "up", "down", "attention", "mlp", "embedding", "norm")


def measure_deviations(width: int, *, enable: bool) -> dict[str, tuple[float, float]]:
    """Return the standard deviations of the outputs of modules, and of their gradients."""
    architecture = TransformerArchitectureConfig(
        vocab_size=512,
        hidden_size=width,
        num_layers=2,
        num_attention_heads=width // 32,
        sequence_length=64,
        weight_tying=False,
        norm_type=NormType.rms,
        mlp_type=MlpType.swiglu,
        umup=UmupConfig(enable=enable),
    )
    found: dict[str, tuple[float, float]] = {}

    def record(name: str, output: Tensor) -> None:
        deviation = float(output.detach().std())
        output.register_hook(lambda gradient: found.__setitem__(name, (deviation, float(gradient.std()))))

    def note(name: str) -> Any:
        return lambda _module, _given, made: record(name, made)

    model = Transformer(architecture, 0).init_weights()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LAYERS:
            module.register_forward_hook(note(name))
    tokens, targets = torch.randint(0, 512, (2, 8, 64), generator=torch.Generator().manual_seed(1))
    model(tokens, targets).backward()
    return found


def test_outputs_and_gradients_start_near_one_at_every_width() -> None:
    narrow, wide = (measure_deviations(width, enable=True) for width in (64, 256))
    usual = [measure_deviations(width, enable=False)["blocks.0.mlp.up"] for width in (64, 256)]
    for name, (out, back) in wide.items():
        assert 0.9 < out < 3, name
        # Queries and keys only weight an average of a few dozen values, so little depends on them at first.
        assert (0.05 if name.endswith(("query", "key")) else 0.3) < back < 2.5, name
        assert out == pytest.approx(narrow[name][0], rel=0.15), name
        assert back == pytest.approx(narrow[name][1], rel=0.4), name
    assert usual[1][0] > 1.8 * usual[0][0], "else there was nothing to put right"


def test_rates_follow_the_width_and_independent_decay_does_not() -> None:
    """AdamW's first step has the size of the learning rate, in the direction of the gradient."""
    sections = {
        "optimizer": {"gradient_clipping": 0},
        "learning_rate_scheduler": {"learning_rate": 0.5, "learning_rate_decay_style": "constant"},
        "training_groups": [{"group_name": "all", "weight_decay": 0.01, "independent_weight_decay": True}],
        "transformer_architecture": {
            "hidden_size": 64,
            "num_layers": 2,
            "num_attention_heads": 2,
            "sequence_length": 8,
            "weight_tying": False,
            "umup": {"enable": True},
        },
    }
    config = Config.model_validate_json(json.dumps(sections))
    with start_runtime(config) as rank_runtime:
        model = parallelize(Transformer(config.transformer_architecture, 1), rank_runtime)
        optimizer = Optimizer(model, config)
        before = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
        for parameter in model.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1)
    depth = 4**-0.5
    gains = {
        "embedding.weight": 1 / 8,
        "head.weight": 1.0,
        "norm.weight": 1.0,
        "blocks.1.attention.query.weight": depth / 8,
        "blocks.0.mlp.down.weight": depth / 16,
        "blocks.0.mlp_norm.weight": depth,
    }
    for name, gain in gains.items():
        step = before[name] * 0.99 - model.parameters[name]
        assert torch.allclose(step, torch.full_like(step, 0.5 * gain), rtol=1e-3), name


@pytest.mark.test_all_only("one more topology")
def test_with_tensor_and_pipeline_parallelism_it_is_the_same_run(tmp_path: Path, config: dict[str, Any]) -> None:
    shape = {
        "weight_tying": False,
        "mlp_type": "swiglu",
        "precision": "float64",
        "attention_bias": True,
        "mlp_bias": True,
        "dropout_after_mlp": 0.1,
        "umup": {"enable": True, "attn_mult": 2.0, "act_mult": 0.5, "residual_mult": 0.7, "residual_attn_ratio": 2.0, "loss_mult": 3.0},
    }
    base = merge_config(
        config,
        transformer_architecture=shape,
        optimizer={"gradient_clipping": 0},
        learning_rate_scheduler={"learning_rate": 0.5},
        trainer={"train_iterations": 6},
    )
    one = run_training(tmp_path / "one", base)
    topology = {"model_parallel_size": 2, "pipe_parallel_size": 2, "sequence_parallel": True}
    assert compute_deviation(one, run_training(tmp_path / "divided", merge_config(base, topology=topology), 4)) < 1e-12
    assert one[6] < 0.9 * one[1], "a model that learns nothing is equal to anything"
