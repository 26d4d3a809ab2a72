"""The transformer: causal, position-aware, its parameters a function of seed and name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmtrain.config.transformer_architecture import MlpType, NormType, TransformerArchitectureConfig
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.model.transformer import IGNORE

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 16}
TOKENS = torch.arange(16).reshape(1, 16)


def made(seed: int = 0, **changes: object) -> Transformer:
    return Transformer(TransformerArchitectureConfig(**{**SHAPE, **changes}), seed)


@pytest.mark.parametrize(
    "options", [{}, {"norm_type": NormType.rms, "mlp_type": MlpType.swiglu, "attention_num_kv_heads": 1, "weight_tying": False}]
)
def test_no_position_sees_the_future(options: dict[str, Any]) -> None:
    model = made(**options)
    changed = TOKENS.clone()
    changed[0, 9] = 63
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.allclose(before[0, 9:], after[0, 9:], atol=1e-6)


def test_order_of_tokens_matters() -> None:
    """Without positions, attention would give the last token the same output for any order of those before it."""
    model = made()
    swapped = TOKENS.clone()
    swapped[0, [2, 7]] = swapped[0, [7, 2]]
    assert not torch.allclose(model(TOKENS)[0, -1], model(swapped)[0, -1], atol=1e-6)


def test_parameters_are_a_function_of_seed_and_name() -> None:
    torch.manual_seed(1)
    model = dict(made().named_parameters())
    torch.manual_seed(2)
    again, deeper, other = (dict(made(**options).named_parameters()) for options in ({}, {"num_layers": 3}, {"seed": 1}))
    matrices = [name for name, parameter in model.items() if parameter.dim() == 2]
    assert all(torch.equal(model[name], again[name]) for name in matrices)
    assert not any(torch.equal(model[name], other[name]) for name in matrices)
    unscaled = [name for name in matrices if not name.endswith(("output.weight", "down.weight"))]
    assert all(torch.equal(model[name], deeper[name]) for name in unscaled)
    assert len({model[name].flatten()[0].item() for name in matrices}) == len(matrices), "no two begin alike"


def test_tied_weights_are_one() -> None:
    model = made()
    assert model.head.weight is model.embedding.weight
    untied = made(weight_tying=False)
    assert untied.head.weight is not untied.embedding.weight


def test_loss_is_the_sum_over_valid_targets() -> None:
    model = made()
    targets = torch.roll(TOKENS, -1)
    some = targets.clone()
    some[0, 5:] = IGNORE
    probabilities = model(TOKENS).log_softmax(-1)[0, torch.arange(16), targets[0]]
    assert model(TOKENS, targets).item() == pytest.approx(-probabilities.sum().item(), rel=1e-6)
    assert model(TOKENS, some).item() == pytest.approx(-probabilities[:5].sum().item(), rel=1e-6)
    assert model(TOKENS, torch.full_like(TOKENS, IGNORE)).item() == 0
