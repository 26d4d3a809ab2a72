"""Schedules as tables of values; training groups and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import LocalWorld, compute_deviation, merge_config, run_training

from swarmtrain.config import Config
from swarmtrain.config.learning_rate_schedule import compute_learning_rate
from swarmtrain.config.schema.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import Optimizer, Transformer, parallelize, start_runtime
from swarmtrain.trainer.optim.param_groups import build_parameter_groups

NAMES = ["embedding.weight", "blocks.0.attention.query.weight", "blocks.0.attention_norm.weight", "norm.weight"]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"learning_rate_decay_style": "constant"}, {1: 1.0, 10: 1.0, 99: 1.0}),
        ({"learning_rate_decay_style": "linear"}, {1: 0.9, 5: 0.5, 10: 0.0, 11: 0.0}),
        ({"learning_rate_decay_style": "linear", "learning_rate_minimum": 0.5}, {5: 0.75, 10: 0.5, 20: 0.5}),
        ({"learning_rate_decay_style": "cosine"}, {5: 0.5, 10: 0.0}),
        (
            {"learning_rate_decay_style": "cosine", "learning_rate_warmup_steps": 4},
            {1: 0.25, 2: 0.5, 4: 1.0, 6: 0.75, 7: 0.5, 8: 0.25, 10: 0.0},
        ),
        (
            {"learning_rate_decay_style": "constant", "learning_rate_warmup_steps": 2, "learning_rate_warmup_delay_steps": 3},
            {1: 0.0, 3: 0.0, 4: 0.5, 5: 1.0, 6: 1.0},
        ),
        ({"learning_rate_decay_style": "linear", "learning_rate_decay_iters": 4}, {2: 0.5, 4: 0.0, 9: 0.0}),
        ({"learning_rate_decay_style": "linear", "learning_rate_decay_iters": 0}, {1: 0.0}),
        ({"learning_rate_decay_style": "linear", "learning_rate_warmup_steps": 10, "learning_rate_decay_iters": 10}, {5: 0.5, 10: 0.0}),
        (
            {"learning_rate_decay_style": "warmup_stable_decay", "learning_rate_warmup_steps": 2, "learning_rate_decay_steps": 4},
            {1: 0.5, 2: 1.0, 6: 1.0, 7: 0.75, 9: 0.25, 10: 0.0, 11: 0.0},
        ),
        ({"learning_rate_decay_style": "warmup_stable_decay", "learning_rate_minimum": 0.2}, {1: 1.0, 8: 1.0, 9: 0.6, 10: 0.2, 99: 0.2}),
        ({"learning_rate_decay_style": "warmup_stable_decay", "learning_rate_decay_iters": 20}, {16: 1.0, 18: 0.5, 20: 0.0}),
        ({"learning_rate_decay_style": "warmup_stable_decay", "learning_rate_decay_steps": 0}, {9: 1.0, 10: 0.0}),
        (
            {
                "learning_rate_decay_style": "warmup_stable_decay",
                "learning_rate_warmup_steps": 4,
                "learning_rate_warmup_delay_steps": 2,
                "learning_rate_decay_steps": 8,
            },
            {2: 0.0, 3: 0.25, 6: 1.0, 8: 0.5, 10: 0.0},
        ),
    ],
    ids=str,
)
def test_schedule(options: dict[str, Any], rates: dict[int, float]) -> None:
    schedule = LearningRateSchedulerConfig.model_validate_json(json.dumps({"learning_rate": 1.0, **options}))
    assert {step: compute_learning_rate(schedule, step, 10) for step in rates} == pytest.approx(rates)


def build_groups_config(*groups: dict[str, Any]) -> Config:
    return Config.model_validate_json(json.dumps({"training_groups": groups}))


def test_without_groups_there_is_one_of_all() -> None:
    (group,) = build_parameter_groups(NAMES, build_groups_config())
    assert (group.parameter_names, group.weight_decay) == (tuple(NAMES), 1e-4)


def test_groups_by_include_and_exclude() -> None:
    own = {"learning_rate": 0.5}
    groups = build_parameter_groups(
        NAMES,
        build_groups_config(
            {"group_name": "norms", "parameters_include": ["norm"], "weight_decay": 0.0, "learning_rate_scheduler": own},
            {"group_name": "rest", "parameters_exclude": ["norm"]},
        ),
    )
    assert [group.parameter_names for group in groups] == [(NAMES[2], NAMES[3]), (NAMES[0], NAMES[1])]
    assert [group.schedule.learning_rate for group in groups] == [0.5, 1e-3]


def test_independent_weight_decay_is_the_same_at_every_learning_rate() -> None:
    """At the schedule's peak a step decays by exactly `weight_decay`; a group whose rate is always 0 does not decay either."""
    for rate, decay in ((0.5, 0.02), (0.25, 0.04), (0.0, 0.0)):
        schedule = {"learning_rate": rate}
        (group,) = build_parameter_groups(
            NAMES,
            build_groups_config(
                {"group_name": "all", "weight_decay": 0.01, "independent_weight_decay": True, "learning_rate_scheduler": schedule}
            ),
        )
        assert group.weight_decay == decay


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"group_name": "a"}, {"group_name": "b", "parameters_include": ["^norm"]}],
            "norm.weight: in more than one group (norm.weight in a and b)",
        ),
        ([{"group_name": "a"}, {"group_name": "b", "parameters_include": ["bias"]}], "no parameter is in b"),
        ([{"group_name": "a", "parameters_include": ["norm"]}], "embedding.weight, blocks.0.attention.query.weight: in no group"),
    ],
)
def test_groups_that_do_not_fit(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TrainingError) as caught:
        build_parameter_groups(NAMES, build_groups_config(*groups))
    assert caught.value.message == message
    assert caught.value.hint
    assert "embedding.weight" in caught.value.hint


def test_groups_reach_the_optimizer(tmp_path: Path, config: dict[str, Any]) -> None:
    """A group with rate 0 does not change: the run differs from one without groups. With two equal groups it does not."""
    halves = [{"group_name": "norms", "parameters_include": ["norm"]}, {"group_name": "rest", "parameters_exclude": ["norm"]}]
    frozen = [halves[0], {**halves[1], "learning_rate_scheduler": {"learning_rate": 0.0}}]
    plain = run_training(tmp_path / "plain", config)
    assert run_training(tmp_path / "halves", {**config, "training_groups": halves}) == plain
    assert compute_deviation(run_training(tmp_path / "frozen", {**config, "training_groups": frozen}), plain) > 1e-3


class _ScalarReadCounter(TorchDispatchMode):
    """Counts the scalars that are read from tensors one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_norm_is_logged_as_it_was_before_clipping() -> None:
    sections = {
        "optimizer": {"method": "sgd", "momentum": 0.0, "gradient_clipping": 0.5},
        "learning_rate_scheduler": {"learning_rate": 1.0, "learning_rate_decay_style": "constant"},
        "training_groups": [{"group_name": "all", "weight_decay": 0.0}],
        "transformer_architecture": {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "sequence_length": 8},
    }
    config = Config.model_validate_json(json.dumps(sections))
    with start_runtime(config) as rank_runtime:
        model = parallelize(Transformer(config.transformer_architecture, 1), rank_runtime)
        optimizer = Optimizer(model, config)
        before = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
        slopes = {name: torch.randn_like(parameter) for name, parameter in before.items()}
        for name, parameter in model.parameters.items():
            parameter.grad = slopes[name].clone()
        with _ScalarReadCounter() as asked:
            made = optimizer.prepare_step(1, torch.tensor(7.0))
            optimizer.step(1)
    assert made.extra_scalars == (7.0,)
    assert not asked.count, "numbers are read together, or a GPU waits for each"
    size = sum(float((slope.double() ** 2).sum()) for slope in slopes.values()) ** 0.5
    assert made.gradient_norm == pytest.approx(size, rel=1e-6)
    assert made.learning_rate == 1.0
    for name, parameter in model.parameters.items():
        assert torch.allclose(parameter, before[name] - slopes[name] * 0.5 / size, atol=1e-6)
        assert parameter.grad is None


@pytest.mark.parametrize("factor", [0.5, 0.9989, 0.9995, 0.99999999, 1.0, 1.00000001, 1.5])
def test_gradients_that_need_no_clipping_are_not_touched(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping would multiply them by exactly 1, in one more pass over all gradients."""
    clipped: list[float] = []
    original = torch.nn.utils.clip_grads_with_norm_

    def clip(parameters: list[Tensor], max_norm: float, norm: Tensor, **options: Any) -> None:
        clipped.append(float(norm))
        original(parameters, max_norm, norm, **options)

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", clip)
    config = Config(optimizer={"gradient_clipping": 1.0}, transformer_architecture={"num_layers": 1})
    with start_runtime(config) as rank_runtime:
        model = parallelize(Transformer(config.transformer_architecture, 1), rank_runtime)
        optimizer = Optimizer(model, config)
        for parameter in model.parameters.values():
            parameter.grad = torch.randn_like(parameter)
        gradients = [parameter.grad for parameter in model.parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(factor / norm)
        expected = [gradient.clone().requires_grad_() for gradient in gradients]
        for tensor, gradient in zip(expected, gradients, strict=True):
            tensor.grad = gradient.clone()
        original(expected, 1.0, torch.nn.utils.get_total_norm(gradients))
        optimizer.prepare_step(1)
    assert bool(clipped) is (factor > 0.999)
    for tensor, gradient in zip(expected, gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0 if factor < 0.999 else 1e-7)


def test_a_nan_loss_ends_the_run(tmp_path: Path, config: dict[str, Any]) -> None:
    wild = merge_config(config, learning_rate_scheduler={"learning_rate": 1e30}, trainer={"save_interval": 1})
    world = LocalWorld(tmp_path, wild, 2)
    assert world.wait() == [1, 1]
    assert "the loss is nan; " in world.read_log()
    assert "NaN/Inf values in rank 0's gradients, in embedding.weight, " in world.read_log()
