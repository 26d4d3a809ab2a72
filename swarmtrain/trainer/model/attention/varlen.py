"""Attention by torch's varlen_attn, which runs flash attention (Dao 2023, arXiv 2307.08691) on sequences of different lengths.

Documents and windows need no mask and no compiler: the kernel is given the boundaries of the documents. It exists for CUDA only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from swarmtrain.trainer.model.attention.attention_method import AttentionOptions, AttentionProblem
from swarmtrain.trainer.model.attention.visibility import Visibility

MIN_QUERIES = 128
"""Fewer queries, as with a KV cache, have a mask that is cheaper than copies of the keys in the kernel's layout."""
_MAX_HEAD_SIZE, _HEAD_SIZE_STEP = 256, 8
_MIN_COMPUTE_CAPABILITY = (8, 0)
_MIN_SEGMENTS = 8
# torch 2.11 has no such parameter; its kernel supports grouped-query attention without it.
_GQA_OPTION = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Segments(NamedTuple):
    """The documents that queries in adjacent positions attend to: for each, its queries and the keys that they attend to.

    The last query of a segment is at the position of its last key, so that the kernel's causal mask applies.
    """

    queries: range
    """Positions of the queries in their sequences. The keys are those of all positions before the end of this range."""
    query_boundaries: Tensor
    """Indices of the first query of each segment among the queries of all samples, and the number of these queries, as int32."""
    key_boundaries: Tensor
    """Indices of the first key of each segment among the keys of all samples, and the number of these keys, as int32."""


@dataclass(frozen=True)
class VarlenAttention:
    """Attention to segments of tokens."""

    segments: tuple[Segments, ...]
    """The segments of each range of queries."""
    window_size: int | None

    @classmethod
    def supports(cls, problem: AttentionProblem) -> bool:
        architecture = problem.architecture
        return (
            problem.device_type == "cuda"
            and problem.dtype in (torch.bfloat16, torch.float16)
            and problem.visibility.query_count >= MIN_QUERIES
            and architecture.head_size <= _MAX_HEAD_SIZE
            and architecture.head_size % _HEAD_SIZE_STEP == 0
            and not architecture.dropout_attention_probs
            and architecture.attention_softcap is None
            and _has_flash_attention(problem.visibility.device)
        )

    @classmethod
    def from_problem(cls, problem: AttentionProblem) -> Self:
        visibility = problem.visibility
        return cls(tuple(_find_segments(visibility, queries) for queries in visibility.ranges), visibility.window_size)

    def compute(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        parts = torch.split(query, [len(each.queries) for each in self.segments], dim=2)
        outputs = [self._compute_part(part, key, value, each, options) for part, each in zip(parts, self.segments, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _compute_part(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
        key_count = segments.queries.stop
        attend: Callable[..., Any] = varlen_attn
        attended: Tensor = attend(
            _concatenate_samples(query),
            _concatenate_samples(key[:, :, :key_count]),
            _concatenate_samples(value[:, :, :key_count]),
            segments.query_boundaries,
            segments.key_boundaries,
            # Upper bounds of the lengths of the segments: the true ones are known on the device only.
            len(segments.queries),
            key_count,
            scale=options.scale,
            window_size=(-1 if self.window_size is None else self.window_size, 0),
            **_GQA_OPTION,
        )
        return attended.view(len(query), -1, *attended.shape[1:]).transpose(1, 2)


def _concatenate_samples(heads: Tensor) -> Tensor:
    """Return `heads` (batch, head, sequence, head size) as (batch x sequence, head, head size)."""
    return heads.transpose(1, 2).flatten(0, 1)


def _find_segments(visibility: Visibility, queries: range) -> Segments:
    """Return the segments of the queries at the positions `queries`.

    With documents, the host waits for the device, because the number of documents is not known.
    """
    key_count, device = queries.stop, visibility.device
    if visibility.document_ids is None:
        starts = torch.arange(visibility.batch_size, device=device) * key_count
    else:
        document_ids = visibility.document_ids[:, :key_count]
        is_start = torch.ones_like(document_ids, dtype=torch.bool)
        is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        starts = is_start.flatten().nonzero().squeeze(1)
    # Empty segments at the end: compiled code is compiled again for each number of segments.
    segment_count = max(_MIN_SEGMENTS, 1 << (len(starts) - 1).bit_length())
    total = visibility.batch_size * key_count
    key_boundaries = torch.cat((starts, starts.new_full((segment_count + 1 - len(starts),), total)))
    samples, positions = key_boundaries // key_count, key_boundaries % key_count
    # A segment that begins before the queries has its first query at their start; one that also ends before them has no query.
    query_boundaries = samples * len(queries) + (positions - queries.start).clamp(min=0)
    return Segments(queries, query_boundaries.int(), key_boundaries.int())


def _has_flash_attention(device: torch.device) -> bool:
    """Return whether `device` can run flash attention. A GPU that is simulated on a CPU can."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _MIN_COMPUTE_CAPABILITY
