"""The formula for FLOPs per token matches what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from swarmtrain.config.schema.transformer_architecture import MlpType, Precision, TransformerArchitectureConfig
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.metrics import throughput


@pytest.mark.parametrize("tied", [True, False])
def test_formula(*, tied: bool) -> None:
    architecture = TransformerArchitectureConfig(
        vocab_size=96,
        hidden_size=32,
        num_layers=3,
        attention_num_kv_heads=2,
        sequence_length=64,
        mlp_type=MlpType.swiglu,
        weight_tying=tied,
    )
    model = Transformer(architecture, 0).init_weights()
    tokens = torch.zeros((2, architecture.sequence_length), dtype=torch.int64)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):  # MATH covers the whole sequence
        model(tokens, tokens).backward()
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert counted.get_total_flops() == throughput.compute_flops_per_token(architecture, matrices) * tokens.numel()


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet_or_none(name: str, tera: float | None) -> None:
    assert throughput.find_peak_flops(name, Precision.bfloat16) == (None if tera is None else tera * 1e12)
    assert throughput.find_peak_flops(name, Precision.float32) is None
