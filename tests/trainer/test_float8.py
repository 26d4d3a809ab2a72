"""FP8 products are as accurate as eight bits allow, under every parallelism, and leave no trace in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from worlds import LocalWorld, compute_deviation, merge_config, read_manifest, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.fp8 import FP8DType, FP8LinearConfig, FP8MatmulConfig, FP8Scaling
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.memory.simulation import simulate_memory_peaks
from swarmtrain.trainer.model import float8

FIELDS = ("fp8_config_attention", "fp8_config_attention_dense_out", "fp8_config_mlp", "fp8_config_mlp_dense_out")
FLOAT8: dict[str, Any] = {**{name: {} for name in FIELDS}, "fp8_emulate": True}
E4M3, E5M2 = 0.04, 0.06
"""Relative errors of products. A number is off by at most 2^-4 of its power of two (e5m2: 2^-3), uniformly distributed, which is 0.026
(0.052) on average; the errors of a product's two factors add in squares, and the products of a row differ in sign."""


def compute_products(recipe: float8.Float8Recipe | None, *, bfloat16: bool = False, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's output, and the gradients of its input (scaled by `factor`) and weight."""
    generator = torch.Generator().manual_seed(1)
    numbers, weight, gradient = (torch.randn(size, generator=generator) for size in ((4, 32, 64), (48, 64), (4, 32, 48)))
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    numbers, weight = (values.to(dtype).requires_grad_() for values in (numbers * factor, weight))
    output = functional.linear(numbers, weight) if recipe is None else float8.compute_linear(numbers, weight, None, recipe)
    output.backward((gradient * 1e-6).to(dtype))
    assert numbers.grad is not None
    assert weight.grad is not None
    return output.detach(), numbers.grad, weight.grad


@pytest.mark.parametrize("kind", FP8DType)
@pytest.mark.parametrize("scaling", FP8Scaling)
@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_products_are_as_accurate_as_their_format(kind: FP8DType, scaling: FP8Scaling, *, emulate: bool, bfloat16: bool) -> None:
    """Torch's own kernel as well as its emulation. `kind` is the dtype of the output's gradient, which is as small as gradients are."""
    gradients = {"dtypes_grad_input": FP8MatmulConfig(left_dtype=kind), "dtypes_grad_weight": FP8MatmulConfig(right_dtype=kind)}
    how = float8.build_recipe(FP8LinearConfig(scaling=scaling, **gradients), emulate=emulate)
    errors = [
        float((one - other).norm() / other.norm())
        for one, other in zip(compute_products(how, bfloat16=bfloat16), compute_products(None), strict=True)
    ]
    for error, most in zip(errors, (E4M3, *(2 * [E4M3 if kind is FP8DType.e4m3 else E5M2])), strict=True):
        assert 0.02 < error < most


def test_emulated_products_are_the_kernels() -> None:
    for one, other in zip(
        *(compute_products(float8.build_recipe(FP8LinearConfig(), emulate=emulate)) for emulate in (False, True)), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-6, atol=0)


def test_a_scale_changes_nothing_but_the_exponent_and_hides_no_infinity() -> None:
    how = float8.build_recipe(FP8LinearConfig(), emulate=True)
    plain, scaled = compute_products(how), compute_products(how, factor=2.0**40)
    assert torch.equal(plain[0] * 2.0**40, scaled[0])
    assert torch.equal(plain[2] * 2.0**40, scaled[2])
    assert not compute_products(how, factor=0.0)[0].any()
    assert not compute_products(how, factor=torch.inf)[0].isfinite().any()


def test_a_product_that_is_not_configured_is_not_in_float8() -> None:
    config = FP8LinearConfig(dtypes_forward=None, dtypes_grad_weight=None)
    here, wide = compute_products(float8.build_recipe(config, emulate=True)), compute_products(None)
    assert [torch.equal(one, other) for one, other in zip(here, wide, strict=True)] == [True, False, True]


@pytest.mark.test_all_only("several training runs; the gate has the products themselves")
def test_a_block_is_compiled_whole() -> None:
    architecture = TransformerArchitectureConfig(
        hidden_size=32, num_layers=1, num_attention_heads=2, sequence_length=16, **dict.fromkeys(FIELDS, FP8LinearConfig())
    )
    model, tokens = Transformer(architecture, 0).init_weights(), torch.arange(32).view(2, 16)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(tokens, tokens).backward()
        gradient = model.blocks[0].get_parameter("attention.query.weight").grad
        assert gradient is not None
        found.append(gradient.clone())
        model.blocks[0].forward = torch.compile(model.blocks[0].forward, dynamic=False, fullgraph=True, backend="aot_eager")
    assert torch.equal(*found)


@pytest.mark.test_all_only("several training runs; the gate has the products themselves")
def test_sharded_or_interrupted_it_is_the_same_run_and_near_the_one_in_fp32(tmp_path: Path, config: dict[str, Any]) -> None:
    """Scales are per micro batch, which is never split over replicas, and per unsharded weight. If a layer is sharded, sums have
    another order: a last bit differs now and then, and rounding to eight bits turns one in a million of these into a sixteenth.
    """
    plain = merge_config(config, topology={"micro_batch_size": 4}, trainer={"train_iterations": 6, "save_interval": 3})
    plain = merge_config(plain, transformer_architecture={"attention_bias": True, "mlp_bias": True})
    # With the config's learning rate, of twice this, the loss jumps from the fifth step on, and any rounding changes where it lands.
    plain = merge_config(plain, learning_rate_scheduler={"learning_rate": 5e-3})
    base = merge_config(plain, transformer_architecture=FLOAT8)
    wide, one = run_training(tmp_path / "wide", plain), run_training(tmp_path / "one", base)
    assert 1e-6 < compute_deviation(wide, one) < 3e-3
    assert one[6] < 0.95 * one[1]
    assert run_training(tmp_path / "fsdp", merge_config(base, topology={"data_parallel_type": "fsdp"}), 3) == one
    tensor = {"model_parallel_size": 2, "sequence_parallel": True}
    assert compute_deviation(one, run_training(tmp_path / "tensor", merge_config(base, topology=tensor), 2)) < 1e-3
    # Resumed with FP8, to the end; and continued without FP8.
    run_training(tmp_path / "twice", merge_config(base, trainer={"train_iterations": 3}))
    assert run_training(tmp_path / "twice", base) == one
    assert read_manifest(tmp_path / "twice", 6)["files"] == read_manifest(tmp_path / "one", 6)["files"]
    taken = merge_config(plain, trainer={"load_dir": str(tmp_path / "one" / "run")})
    assert run_training(tmp_path / "after", merge_config(taken, trainer={"train_iterations": 7}))[7] < one[6] + 0.2


def test_every_rank_reports_a_device_without_float8(tmp_path: Path, config: dict[str, Any]) -> None:
    world = LocalWorld(tmp_path, merge_config(config, transformer_architecture={"fp8_config_mlp": {}}), 2)
    assert world.wait() == [1, 1]
    for rank in range(2):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert log.count("config transformer_architecture.fp8_config_mlp: needs a GPU that supports float8 matmuls") == 1


def test_a_simulation_accounts_for_inputs_kept_in_eight_bits(config: dict[str, Any]) -> None:
    def peak(**shape: Any) -> int:
        shape = {"hidden_size": 64, "num_layers": 8, "sequence_length": 512, "precision": "bfloat16", **shape}
        wanted = merge_config(config, transformer_architecture=shape, topology={"micro_batch_size": 12})
        return simulate_memory_peaks(Config.model_validate_json(json.dumps(wanted)), 1, 0)[1].size

    assert peak(**{name: {} for name in FIELDS}) < 0.98 * peak()
