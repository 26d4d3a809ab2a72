"""Mixed precision: weights are cast from float32 parameters once per step, and the losses stay close to those of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import compute_deviation, merge_config, read_validation_losses, run_training

from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.ddp import SingleReplicaModel
from swarmtrain.trainer.parallel.working_weights import GradientSums, WorkingWeights

TOLERANCE = 0.01
"""Of each training and validation loss, relative to float32, over 12 steps in which the loss falls by more than 10 %."""
SHAPE = {"vocab_size": 16, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "sequence_length": 8}
GPT = {"learned_positions": True, "attention_bias": True, "mlp_bias": True, "layernorm": {"layernorm_bias": True}}
LLAMA = {"norm_type": "rms", "mlp_type": "swiglu", "weight_tying": False, "key_query_norm": True, "attention_num_kv_heads": 2}
TOPOLOGIES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, GPT),
    "ddp": (2, {}, LLAMA),
    "fsdp": (2, {"data_parallel_type": "fsdp"}, LLAMA),
    "fsdp, reduced once": (2, {"data_parallel_type": "fsdp", "reduce_every_micro_batch": False}, GPT),
    "hsdp": (4, {"data_parallel_type": "hsdp", "data_parallel_shard_size": 2}, LLAMA),
    "tensor and sequence": (2, {"model_parallel_size": 2, "sequence_parallel": True}, LLAMA),
    "context": (2, {"context_parallel_size": 2}, LLAMA),
    "pipe": (2, {"pipe_parallel_size": 2}, GPT),
    "pipe x fsdp": (4, {"pipe_parallel_size": 2, "data_parallel_type": "fsdp"}, GPT),
}
IN_GATE = ("ddp", "fsdp", "pipe")


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_GATE else pytest.param(name, marks=pytest.mark.test_all_only("three topologies are enough"))
        for name in TOPOLOGIES
    ],
)
def test_bfloat16_follows_the_losses_of_float32(name: str, tmp_path: Path, config: dict[str, Any]) -> None:
    ranks, topology, shape = TOPOLOGIES[name]
    exact = merge_config(config, transformer_architecture=shape, trainer={"eval_interval": 6})
    coarse = merge_config(exact, topology=topology, transformer_architecture={"precision": "bfloat16"})
    losses = run_training(tmp_path / "exact", exact), run_training(tmp_path / "coarse", coarse, ranks)
    assert losses[0][12] < 0.9 * losses[0][1]
    assert 1e-6 < compute_deviation(*losses) < TOLERANCE
    assert compute_deviation(*(read_validation_losses(tmp_path / run) for run in ("exact", "coarse"))) < TOLERANCE


def build_model(precision: str = "bfloat16") -> Transformer:
    return Transformer(TransformerArchitectureConfig(**SHAPE, precision=Precision(precision)), 1).init_weights()


class CastCounter(TorchDispatchMode):
    """Counts casts between types, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten._foreach_copy_.default):
            self.casts.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_weights_are_cast_only_after_parameters_have_changed() -> None:
    model = build_model()
    weights = WorkingWeights(model)
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    with CastCounter() as counter:
        first = model(tokens)
        model(tokens)
    assert "_foreach_copy_.default" not in counter.casts
    with torch.no_grad():
        weights.parameters[0].add_(1)
    with CastCounter() as counter:
        second = model(tokens)
        assert torch.equal(model(tokens), second)
    assert counter.casts.count("_foreach_copy_.default") == 1
    assert not torch.equal(first, second)
    assert first.dtype is torch.bfloat16
    assert {parameter.dtype for parameter in weights.parameters} == {torch.float32}


def test_in_float32_the_weights_are_the_parameters() -> None:
    model = build_model("float32")
    weights = WorkingWeights(model)
    assert all(weight is parameter for weight, parameter in zip(weights.weights, weights.parameters, strict=True))
    assert weights.weights == list(model.parameters())


def test_tied_weights_stay_tied() -> None:
    model = build_model()
    WorkingWeights(model)
    assert model.head.weight is model.embedding.weight


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    """The sum of a large and a small gradient is what bfloat16 could not hold."""
    model = SingleReplicaModel(build_model(), sum_dtype=torch.float32)
    tokens, factors, sums = torch.arange(8)[None], (1.0, 1e-3), []
    for micro_batches in ([0], [1], [0, 1]):
        for micro_batch in micro_batches:
            with model.accumulate_micro_batch_gradients(is_last=micro_batch == micro_batches[-1]):
                torch.autograd.backward(model(tokens, tokens) * factors[micro_batch])
        sums.append([parameter.grad for parameter in model.parameters])
    for large, small, both in zip(*sums, strict=True):
        assert large is not None and small is not None  # noqa: PT018
        assert both.dtype is torch.float32
        assert torch.equal(large + small, both)


def test_weights_are_freed_after_the_last_backward_pass_of_a_step() -> None:
    transformer = build_model()
    model = SingleReplicaModel(transformer, sum_dtype=torch.float32)
    tokens, losses, sizes = torch.arange(8)[None], [], []
    for is_last in (False, True, True):
        with model.accumulate_micro_batch_gradients(is_last=is_last):
            loss = model(tokens, tokens)
            torch.autograd.backward(loss)
        losses.append(float(loss))
        sizes.append(sum(weight.untyped_storage().nbytes() for weight in transformer.parameters()))
    assert losses == [losses[0]] * 3
    assert sizes == [2 * sum(parameter.numel() for parameter in model.parameters), 0, 0]
    assert torch.isfinite(transformer(tokens)).all()


def test_a_sum_takes_over_the_gradient() -> None:
    model = build_model()
    weights = WorkingWeights(model)
    sums, weight = GradientSums(weights, torch.float32), weights.weights[0]
    gradients: list[Tensor] = [torch.full_like(weight, value) for value in (1.0, 2**-9)]
    for gradient in gradients:
        weight.grad = gradient
        sums.add_gradient(weight)
        assert weight.grad is None
    sums.move_to_parameters()
    total = weights.parameters[0].grad
    assert total is not None
    assert torch.all(total == 1 + 2**-9)
    assert sums.take_sum(weight) is None
