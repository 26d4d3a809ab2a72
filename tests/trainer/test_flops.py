"""The formula for a token's operations is what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from swarmtrain.config.transformer_architecture import MlpType, TransformerArchitectureConfig
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.metrics import flops


@pytest.mark.parametrize("tied", [True, False])
def test_formula(*, tied: bool) -> None:
    shape = TransformerArchitectureConfig(
        vocab_size=96,
        hidden_size=32,
        num_layers=3,
        attention_num_kv_heads=2,
        sequence_length=64,
        mlp_type=MlpType.swiglu,
        weight_tying=tied,
    )
    model = Transformer(shape, 0).fill()
    tokens = torch.zeros((2, shape.sequence_length), dtype=torch.int64)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):  # which sees the whole sequence
        model(tokens, tokens).backward()
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert counted.get_total_flops() == flops.per_token(shape, matrices) * tokens.numel()
