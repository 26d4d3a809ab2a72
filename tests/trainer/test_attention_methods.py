"""Attention methods: all compute the same, and none needs memory for each pair of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmtrain.config.schema.trainer import AttentionKernel
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.model.attention import dense, flex, varlen
from swarmtrain.trainer.model.attention.attention_method import AttentionMethod, AttentionOptions, AttentionProblem
from swarmtrain.trainer.model.attention.dense import CausalAttention, DenseAttention
from swarmtrain.trainer.model.attention.flex import FlexAttention
from swarmtrain.trainer.model.attention.selection import build_attention_methods
from swarmtrain.trainer.model.attention.varlen import VarlenAttention
from swarmtrain.trainer.model.attention.visibility import Visibility

CPU = torch.device("cpu")
LENGTH, SAMPLES = 256, 2
DOCUMENTS = torch.tensor([[0] * 100 + [1] * 156, [0] * 30 + [1] * 200 + [2] * 26])
CONTEXT_PARALLEL = range(64, 128), range(128, 192)
VISIBILITIES = {
    "documents": Visibility(SAMPLES, LENGTH, CPU, DOCUMENTS),
    "window": Visibility(SAMPLES, LENGTH, CPU, window_size=20),
    "documents and window": Visibility(SAMPLES, LENGTH, CPU, DOCUMENTS, 20),
    "context parallel": Visibility(SAMPLES, LENGTH, CPU, query_ranges=CONTEXT_PARALLEL),
    "context parallel, first and last chunk": Visibility(SAMPLES, LENGTH, CPU, query_ranges=(range(64), range(192, 256))),
    "context parallel, documents": Visibility(SAMPLES, LENGTH, CPU, DOCUMENTS, query_ranges=CONTEXT_PARALLEL),
    "context parallel, documents and window": Visibility(SAMPLES, LENGTH, CPU, DOCUMENTS, 20, CONTEXT_PARALLEL),
}
each_visibility = pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES)


def build_problem(visibility: Visibility, **changes: Any) -> AttentionProblem:
    return AttentionProblem(visibility, TransformerArchitectureConfig(**changes), torch.bfloat16, "cuda")


def draw_inputs(visibility: Visibility, heads: tuple[int, int] = (4, 2), size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in the layout that projections have: (batch, sequence, head, head size), transposed."""
    random = torch.Generator().manual_seed(1)
    counts = (visibility.query_count, heads[0]), *[(visibility.key_count, heads[1])] * 2
    drawn = [torch.randn(visibility.batch_size, count, head_count, size, generator=random) for count, head_count in counts]
    query, key, value = (heads.transpose(1, 2).requires_grad_() for heads in drawn)
    return query, key, value


def attend_with_gradients(method: AttentionMethod, visibility: Visibility, options: AttentionOptions) -> tuple[Tensor, ...]:
    """Return the output of `method`, and the gradients of queries, keys and values."""
    inputs = draw_inputs(visibility)
    output = method.compute(*inputs, options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return output, *torch.autograd.grad((output * weights).sum(), inputs)


def run_varlen_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_boundaries: Tensor,
    key_boundaries: Tensor,
    *limits: int,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = True,
) -> Tensor:
    """Do what the documentation of torch's varlen_attn says, which has no kernel for CPUs: align the last query with the last key."""
    assert query_boundaries.dtype == key_boundaries.dtype == torch.int32
    assert enable_gqa
    outputs = []
    segments = zip(query_boundaries[:-1], query_boundaries[1:], key_boundaries[:-1], key_boundaries[1:], strict=True)
    for first_query, end_query, first_key, end_key in segments:
        queries, keys = int(end_query - first_query), int(end_key - first_key)
        assert 0 <= queries <= limits[0]
        assert 0 <= keys <= limits[1]
        if not queries:
            continue
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        visible = (distance >= -window_size[1]) & ((distance <= window_size[0]) | (window_size[0] < 0))
        part, keys_part, values_part = (
            heads[start:end].transpose(0, 1)
            for heads, start, end in ((query, first_query, end_query), (key, first_key, end_key), (value, first_key, end_key))
        )
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                part[None], keys_part[None], values_part[None], attn_mask=visible, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)


@each_visibility
@pytest.mark.parametrize("scale", [None, 0.3])
def test_segments_contain_what_a_dense_mask_shows(monkeypatch: pytest.MonkeyPatch, visibility: Visibility, scale: float | None) -> None:
    """The kernel itself runs on GPUs only: a row of `make gpu` compares it with a CPU."""
    monkeypatch.setattr(varlen, "varlen_attn", run_varlen_on_cpu)
    monkeypatch.setattr(varlen, "_GQA_OPTION", {"enable_gqa": True})
    problem, options = build_problem(visibility), AttentionOptions(scale=scale)
    expected = attend_with_gradients(DenseAttention.from_problem(problem), visibility, options)
    for actual, wanted in zip(attend_with_gradients(VarlenAttention.from_problem(problem), visibility, options), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_compiled_code_sees_few_numbers_of_segments() -> None:
    counts = set()
    for documents in range(1, 129):
        ids = (torch.arange(LENGTH) * documents // LENGTH).expand(SAMPLES, -1)
        (segments,) = VarlenAttention.from_problem(build_problem(Visibility(SAMPLES, LENGTH, CPU, ids))).segments
        assert len(segments.key_boundaries.unique()) == SAMPLES * documents + 1
        counts.add(len(segments.key_boundaries))
    assert counts == {9, 17, 33, 65, 129, 257}


@each_visibility
def test_flex_attention_sees_what_a_dense_mask_shows(monkeypatch: pytest.MonkeyPatch, visibility: Visibility) -> None:
    monkeypatch.setattr(flex, "_compile_once", lambda function: function)
    problem = build_problem(visibility)
    for options in (AttentionOptions(), AttentionOptions(scale=0.3, softcap=0.5)):
        inputs = [each.detach() for each in draw_inputs(visibility)]
        actual = FlexAttention.from_problem(problem).compute(*inputs, options)
        torch.testing.assert_close(actual, DenseAttention.from_problem(problem).compute(*inputs, options), atol=1e-5, rtol=1e-5)


@each_visibility
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_parts_of_the_queries_give_the_same(monkeypatch: pytest.MonkeyPatch, visibility: Visibility, softcap: float | None) -> None:
    options = AttentionOptions(softcap=softcap)
    expected = attend_with_gradients(DenseAttention.from_problem(build_problem(visibility)), visibility, options)
    monkeypatch.setattr(dense, "_MAX_BYTES", 50 * LENGTH * (1 if softcap is None else 4 * 4 * SAMPLES))
    method = DenseAttention.from_problem(build_problem(visibility))
    assert softcap or method.mask is None
    for actual, wanted in zip(attend_with_gradients(method, visibility, options), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@each_visibility
def test_keys_outside_the_visible_range_are_invisible(visibility: Visibility) -> None:
    mask = visibility.build_dense_mask()
    for queries in (range(1), range(60, 70), range(visibility.query_count - 5, visibility.query_count)):
        keys = visibility.find_visible_keys(queries)
        visible = mask[:, :, queries.start : queries.stop]
        assert visible[..., keys.start : keys.stop].sum() == visible.sum()
        assert torch.equal(visibility.build_dense_mask(queries, keys), visible[..., keys.start : keys.stop])
        if visibility.document_ids is None:
            assert visible[..., keys.start].any()
            assert visible[..., keys.stop - 1].any()


def test_soft_capping_bounds_the_scores() -> None:
    """Against the formula of Gemma 2, and without an effect if the bound is high."""
    visibility = Visibility(SAMPLES, 40, CPU)
    method, inputs = DenseAttention.from_problem(build_problem(visibility)), draw_inputs(visibility, (4, 4))
    query, key, value = inputs
    scores = 2 * torch.tanh(query @ key.mT / 4 / 2)
    weights = scores.masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(method.compute(*inputs, AttentionOptions(softcap=2.0)), weights @ value)
    plain = CausalAttention().compute(*inputs, AttentionOptions())
    torch.testing.assert_close(method.compute(*inputs, AttentionOptions(softcap=1e4)), plain, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(weights @ value, plain, atol=1e-2)


WINDOW: dict[str, Any] = {"num_local_attention_heads": 4, "local_attention_window_size": 20}


@pytest.mark.parametrize(
    ("device_type", "kernel", "changes", "dtype", "expected"),
    [
        ("cuda", "auto", {}, torch.bfloat16, VarlenAttention),
        ("cuda", "auto", {}, torch.float16, VarlenAttention),
        ("cuda", "auto", {}, torch.float32, DenseAttention),
        ("cuda", "auto", {"dropout_attention_probs": 0.1}, torch.bfloat16, DenseAttention),
        ("cuda", "auto", {"attention_softcap": 50.0}, torch.bfloat16, DenseAttention),
        ("cuda", "auto", {"attention_head_size": 512}, torch.bfloat16, DenseAttention),
        ("cuda", "auto", {"attention_head_size": 12}, torch.bfloat16, DenseAttention),
        ("cuda", "flex", {}, torch.bfloat16, FlexAttention),
        ("cuda", "flex", {"attention_softcap": 50.0}, torch.float32, FlexAttention),
        ("cuda", "flex", {"dropout_attention_probs": 0.1}, torch.bfloat16, DenseAttention),
        ("cuda", "dense", {}, torch.bfloat16, DenseAttention),
        ("cpu", "auto", {}, torch.bfloat16, DenseAttention),
        ("cpu", "flex", {}, torch.bfloat16, DenseAttention),
    ],
)
def test_the_first_method_that_supports_a_problem_is_chosen(
    device_type: str, kernel: str, changes: dict[str, Any], dtype: torch.dtype, expected: type[AttentionMethod]
) -> None:
    architecture = TransformerArchitectureConfig(**{**WINDOW, **changes})
    choose: Callable[..., Any] = build_attention_methods
    methods = choose(architecture, Visibility(1, LENGTH, CPU), dtype, AttentionKernel(kernel), device_type=device_type)
    assert type(methods.local) is expected
    assert methods.full is methods.local, "no head has full attention"
    mixed = choose(
        architecture.model_copy(update={"local_attention_layers": (True, False)}),
        Visibility(1, LENGTH, CPU),
        dtype,
        AttentionKernel(kernel),
        device_type=device_type,
    )
    assert type(mixed.local) is expected
    assert type(mixed.full) is (expected if architecture.attention_softcap else CausalAttention)


def test_few_queries_have_a_dense_mask() -> None:
    """With a KV cache, the kernels would need a copy of all keys for each token."""
    visibility = Visibility(1, 1000, CPU, query_ranges=(range(999, 1000),))
    for kernel in AttentionKernel:
        methods = build_attention_methods(TransformerArchitectureConfig(), visibility, torch.bfloat16, kernel, device_type="cuda")
        assert type(methods.full) is DenseAttention


@pytest.mark.parametrize("document_count", [None, 1, 500])
def test_methods_for_131072_tokens_hold_less_than_100_mb(document_count: int | None) -> None:
    length = 131072
    documents = None if document_count is None else (torch.arange(length) * document_count // length)[None]
    ranges = (range(0, 16384), range(length - 16384, length))
    for visibility in (Visibility(1, length, CPU, documents, 4096), Visibility(1, length, CPU, documents, query_ranges=ranges)):
        (problem, half) = (build_problem(visibility), length // 2)
        segments = VarlenAttention.from_problem(problem).segments
        assert sum(each.nbytes for part in segments for each in (part.query_boundaries, part.key_boundaries)) < 20_000
        assert DenseAttention.from_problem(problem).mask is None
        at_once = dense._MAX_BYTES // length
        keys = visibility.find_visible_keys(range(half, half + at_once) if visibility.query_ranges is None else range(at_once))
        assert at_once * len(keys) <= dense._MAX_BYTES < 100e6


@pytest.mark.parametrize("changes", [{}, {"attention_softcap": 1.0}])
def test_models_with_long_samples_give_the_same_in_parts(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    architecture = TransformerArchitectureConfig(
        hidden_size=32, num_layers=2, sequence_length=64, reset_attention_mask=True, **{**WINDOW, **changes}
    )
    tokens, documents = torch.arange(128).view(2, 64), (torch.arange(128).view(2, 64) % 64 > 20).long()
    results = []
    for limit in (1 << 26, 2000):
        monkeypatch.setattr(dense, "_MAX_BYTES", limit)
        model = Transformer(architecture, 0).init_weights()
        loss = model(tokens, tokens, documents)
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
