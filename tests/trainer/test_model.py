"""The transformer: causal, position-aware, its parameters a function of seed and name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from swarmtrain.config.schema.transformer_architecture import (
    LayerNormConfig,
    MlpType,
    NormType,
    PositionType,
    TransformerArchitectureConfig,
)
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.model import dropout
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.positions import RotaryEmbedding, apply_rotary_embedding
from swarmtrain.trainer.model.transformer import InPlaceCrossEntropyLoss

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 16}
TOKENS = torch.arange(16).reshape(1, 16)


def build_small_model(seed: int = 0, **changes: object) -> Transformer:
    return Transformer(TransformerArchitectureConfig(**{**SHAPE, **changes}), seed).init_weights()


@pytest.mark.parametrize(
    "options", [{}, {"norm_type": NormType.rms, "mlp_type": MlpType.swiglu, "attention_num_kv_heads": 1, "weight_tying": False}]
)
def test_no_position_sees_the_future(options: dict[str, Any]) -> None:
    model = build_small_model(**options)
    changed = TOKENS.clone()
    changed[0, 9] = 63
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.allclose(before[0, 9:], after[0, 9:], atol=1e-6)


def test_order_of_tokens_matters() -> None:
    """Without positions, attention would give the last token the same output for any order of those before it."""
    model = build_small_model()
    swapped = TOKENS.clone()
    swapped[0, [2, 7]] = swapped[0, [7, 2]]
    assert not torch.allclose(model(TOKENS)[0, -1], model(swapped)[0, -1], atol=1e-6)


def test_parameters_are_a_function_of_seed_and_name() -> None:
    torch.manual_seed(1)
    model = dict(build_small_model().named_parameters())
    torch.manual_seed(2)
    again, deeper, other = (dict(build_small_model(**options).named_parameters()) for options in ({}, {"num_layers": 3}, {"seed": 1}))
    matrices = [name for name, parameter in model.items() if parameter.dim() == 2]
    assert all(torch.equal(model[name], again[name]) for name in matrices)
    assert not any(torch.equal(model[name], other[name]) for name in matrices)
    unscaled = [name for name in matrices if not name.endswith(("output.weight", "down.weight"))]
    assert all(torch.equal(model[name], deeper[name]) for name in unscaled)
    assert len({model[name].flatten()[0].item() for name in matrices}) == len(matrices), "no two begin alike"


def test_tied_weights_are_one() -> None:
    model = build_small_model()
    assert model.head.weight is model.embedding.weight
    untied = build_small_model(weight_tying=False)
    assert untied.head.weight is not untied.embedding.weight


def test_loss_is_the_sum_over_valid_targets() -> None:
    model = build_small_model()
    targets = torch.roll(TOKENS, -1)
    some = targets.clone()
    some[0, 5:] = IGNORE_INDEX
    probabilities = model(TOKENS).log_softmax(-1)[0, torch.arange(16), targets[0]]
    assert model(TOKENS, targets).item() == pytest.approx(-probabilities.sum().item(), rel=1e-6)
    assert model(TOKENS, some).item() == pytest.approx(-probabilities[:5].sum().item(), rel=1e-6)
    assert model(TOKENS, torch.full_like(TOKENS, IGNORE_INDEX)).item() == 0


def test_gradients_of_the_loss_are_torchs() -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([3, 0, IGNORE_INDEX, 10, 3, IGNORE_INDEX])
    theirs = functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    [slope] = torch.autograd.grad(theirs * 3, logits)
    ours = InPlaceCrossEntropyLoss()(logits * 1, targets).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.autograd.grad(ours * 3, logits), (slope,), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("percentage", [1.0, 0.5])
@pytest.mark.parametrize("kind", [PositionType.rotary, PositionType.rotary_complex])
def test_pairs_rotate_by_their_angle_and_gradients_rotate_back(kind: PositionType, percentage: float) -> None:
    architecture = TransformerArchitectureConfig(**{**SHAPE, "relative_position_embedding_type": kind, "rotary_percentage": percentage})
    rotation = RotaryEmbedding(architecture)(7, torch.float32)
    assert rotation is not None
    cosine, sine = (table.double() for table in rotation)
    heads = torch.randn(2, 3, 7, architecture.head_size, dtype=torch.float64, requires_grad=True)
    turned, pairs = apply_rotary_embedding(heads, (cosine, sine), kind), architecture.rotary_dimensions // 2
    for pair in range(pairs):
        first, second = (pair, pair + pairs) if kind is PositionType.rotary else (2 * pair, 2 * pair + 1)
        whole = torch.complex(cosine[:, first], sine[:, pair]) * torch.complex(heads[..., first], heads[..., second])
        torch.testing.assert_close(torch.complex(turned[..., first], turned[..., second]), whole)
    assert torch.equal(turned[..., 2 * pairs :], heads[..., 2 * pairs :])
    assert torch.autograd.gradcheck(lambda given: apply_rotary_embedding(given, (cosine, sine), kind), heads)


ALL_OPTIONS: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "key_query_norm": True,
    "rotary_percentage": 0.5,
    "num_local_attention_heads": 2,
    "local_attention_window_size": 3,
    "attention_num_kv_heads": 2,
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "layernorm": LayerNormConfig(layernorm_bias=True),
}
DROPOUT: dict[str, Any] = {"dropout_embedding": 0.2, "dropout_after_attention": 0.2, "dropout_after_mlp": 0.2}


def test_every_option_adds_what_it_says() -> None:
    plain, full = ({name for name, _ in build_small_model(**options).named_parameters()} for options in ({}, ALL_OPTIONS))
    block = {
        "query.bias",
        "key.bias",
        "value.bias",
        "output.bias",
        "query_norm.weight",
        "query_norm.bias",
        "key_norm.weight",
        "key_norm.bias",
    }
    added = {f"attention.{name}" for name in block} | {"mlp.up.bias", "mlp.down.bias", "attention_norm.bias", "mlp_norm.bias"}
    assert full - plain == {f"blocks.{layer}.{name}" for layer in range(2) for name in added} | {"norm.bias"}
    assert plain < full


@pytest.mark.parametrize("kind", [PositionType.rotary, PositionType.rotary_complex])
def test_a_packed_sample_is_its_documents_one_by_one(kind: PositionType) -> None:
    model = build_small_model(**ALL_OPTIONS, relative_position_embedding_type=kind)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 7])
    packed = model(TOKENS, documents=documents)
    alone = torch.cat([model(part) for part in TOKENS.split([5, 4, 7], dim=1)], dim=1)
    assert torch.allclose(packed, alone, atol=1e-6)
    assert not torch.allclose(packed[0, 5:], model(TOKENS)[0, 5:], atol=1e-4), "else nothing was kept apart"
    without_positions = build_small_model(**{**ALL_OPTIONS, "reset_position_ids": False}, relative_position_embedding_type=kind)
    assert torch.allclose(without_positions(TOKENS, documents=documents), packed, atol=1e-5), "only distances count"


def test_local_heads_see_their_window_alone() -> None:
    """Two layers with a window of 3 reach six tokens back."""
    changed = TOKENS.clone()
    changed[0, 2] = 63
    local, mixed = (build_small_model(num_local_attention_heads=heads, local_attention_window_size=3) for heads in (4, 1))
    assert torch.equal(local(TOKENS)[0, 9:], local(changed)[0, 9:])
    assert not torch.allclose(local(TOKENS)[0, 8], local(changed)[0, 8], atol=1e-7)
    assert not torch.allclose(mixed(TOKENS)[0, 9:], mixed(changed)[0, 9:], atol=1e-7)


def test_without_positions_a_token_sees_a_set() -> None:
    model = build_small_model(relative_position_embedding_type=PositionType.none, num_layers=1)
    swapped = TOKENS.clone()
    swapped[0, [2, 7]] = swapped[0, [7, 2]]
    assert torch.allclose(model(TOKENS)[0, -1], model(swapped)[0, -1], atol=1e-6)


def test_only_the_selected_layers_have_local_heads() -> None:
    """One layer with a window of 3 reaches three tokens back, a layer without one reaches all."""
    local = {"num_local_attention_heads": 4, "local_attention_window_size": 3}
    changed = TOKENS.clone()
    changed[0, 2] = 63
    for pattern, reach in ({(True,): 6, (True, False): 13, (False, True, True): 13, (True, True, False): 6}).items():
        model = build_small_model(**local, local_attention_layers=pattern)
        difference = (model(TOKENS) - model(changed))[0].abs().amax(1)
        assert int(difference.nonzero().max()) == 2 + reach, pattern
    every_second = build_small_model(**local, local_attention_layers=(True, False), num_layers=5)
    assert [block.attention.num_local_attention_heads for block in every_second.blocks] == [4, 0, 4, 0, 4]


def test_logits_are_soft_capped() -> None:
    plain, capped = (build_small_model(logit_softcap=softcap)(100 * TOKENS % 64) for softcap in (None, 0.1))
    torch.testing.assert_close(capped, 0.1 * torch.tanh(plain / 0.1))
    assert plain.abs().max() > 0.1 > capped.abs().max()


def test_dropout_is_a_function_of_step_sample_layer_place_and_token() -> None:
    model = build_small_model(**DROPOUT)
    four = TOKENS.repeat(4, 1)
    with dropout.seed_dropout(seed=7, first_sample=0):
        whole = model(four)
        assert torch.equal(model(four), whole), "whatever was drawn before"
    with dropout.seed_dropout(seed=7, first_sample=2):
        assert torch.allclose(model(four[2:]), whole[2:], atol=1e-6), "however samples are divided"
    with dropout.seed_dropout(seed=8, first_sample=0):
        assert not torch.allclose(model(four), whole, atol=1e-3)
    assert not torch.allclose(whole[0], whole[1], atol=1e-3)
    model.eval()
    assert torch.equal(model(four), build_small_model()(four))


def test_dropout_drops_its_part_everywhere_alike() -> None:
    """Within five standard deviations: over all elements, each token, each dimension, and pairs of neighbours and of dropout places."""
    first, second = (dropout.Dropout(0.3, place) for place in ("0 attention", "1 attention"))
    with dropout.seed_dropout(seed=3, first_sample=5):
        numbers = dropout.compute_token_noise(4, torch.arange(100))
    one, other = (module(torch.ones(4, 100, 500), numbers) for module in (first, second))
    kept, too = one != 0, other != 0
    assert torch.allclose(one[kept], torch.tensor(1 / 0.7))
    for part in (kept, kept.roll(1, 0) ^ kept, kept.roll(1, 1) ^ kept, kept.roll(1, 2) ^ kept, kept ^ too):
        mean = 0.7 if part is kept else 2 * 0.3 * 0.7
        for kinds, count in (((0, 1), 400), ((0, 2), 2000), ((1, 2), 50_000), ((0, 1, 2), 200_000)):
            assert (part.float().mean(kinds) - mean).abs().max() < 5 * (mean * (1 - mean) / count) ** 0.5


def test_dropout_of_attention_weights_is_off_in_evaluation() -> None:
    model = build_small_model(dropout_attention_probs=0.5)
    torch.manual_seed(1)
    first = model(TOKENS)
    torch.manual_seed(1)
    assert torch.equal(model(TOKENS), first), "the same seed drops the same"
    assert not torch.allclose(first, build_small_model()(TOKENS), atol=1e-4)
    assert torch.equal(model.eval()(TOKENS), build_small_model()(TOKENS))
