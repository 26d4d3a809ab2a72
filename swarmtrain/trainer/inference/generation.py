"""Token generation: each token is sampled from the model's next-token distribution, given all earlier tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.random_seeds import derive_seed
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate
from swarmtrain.trainer.tokenize.document_builders import AddedTokens
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer

GatherLogits = Callable[[Tensor], Tensor]
"""Function that takes the logits of this rank's vocabulary shard, and returns the logits of the full vocabulary."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters for token generation."""

    temperature: float = 1.0
    """Sampling temperature: the logits are divided by it. 0: greedy decoding."""
    top_k: int = 0
    """Sample only from the `top_k` most likely tokens; 0: from all tokens."""
    top_p: float = 1.0
    """Sample only from the smallest set of tokens whose total probability is at least this (Holtzman et al. 2019, arXiv 1904.09751)."""
    seed: int = 0


def encode_prompt(
    tokenizer: BaseTokenizer,
    text: str,
    max_length: int,
    place: str,
    *,
    begin_tokens: Sequence[int] = (),
    template: ChatTemplate | None = None,
) -> list[int]:
    """Return the tokens of the prompt `text`, after `begin_tokens` unless it begins with them. `place`: shown in errors.

    `template`: the prompt is the user's message in a conversation. Raises TrainingError if the template cannot render it, and if the
    prompt has no tokens, or has `max_length` tokens or more.
    """
    if template:
        try:
            text, begin_tokens = template.render_prompt([{"role": "user", "content": text}]), ()
        except ValueError as error:
            raise TrainingError(f"a prompt {error}", place=place) from None
    [encoding] = tokenizer.encode([text])
    tokens, _, _ = AddedTokens(tuple(begin_tokens)).add_to(encoding.tokens)
    if not len(tokens):
        raise TrainingError("a prompt is empty", place=place, hint="use at least one character")
    if len(tokens) >= max_length:
        reason = f"a prompt has {len(tokens)} tokens, but the model supports {max_length} at most"
        raise TrainingError(reason, place=place, hint="shorten it")
    return [int(token) for token in tokens]


def build_logits_gather(group: dist.ProcessGroup) -> GatherLogits:
    """Return a function that gathers logits (batch, vocabulary) from the vocabulary shards of the ranks of `group`."""

    def gather_logits(logits: Tensor) -> Tensor:
        if group.size() == 1:
            return logits
        shards = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(shards, logits.contiguous(), group=group)
        return torch.cat(shards, dim=-1)

    return gather_logits


@torch.no_grad()
def generate_tokens(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams,
    *,
    max_tokens: int,
    eos_tokens: Collection[int] = (),
    gather_logits: GatherLogits = lambda logits: logits,
    is_done: Callable[[int], bool] = lambda prompt: False,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, up to `max_tokens` times; None for sequences that have ended.

    A sequence ends when a token of `eos_tokens` is sampled, which is not yielded, when `is_done` returns True for the index of its prompt,
    or when it has the architecture's `sequence_length`. Prompts of different lengths are padded on the left. The padding is a separate
    document, so the model's architecture must mask attention across documents. The tokens sampled for a prompt depend on its index and on
    `sampling_params.seed`, not on the other prompts. `use_cache`: whether to use a KV cache.

    Raises TrainingError if the model returns NaN/Inf logits.
    """
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    token_budgets = [min(max_tokens, model.architecture.sequence_length - len(prompt)) for prompt in prompts]
    tokens = torch.stack([pad(torch.tensor(prompt), (longest - len(prompt), 0)) for prompt in prompts]).to(device)
    documents = None
    if len({len(prompt) for prompt in prompts}) > 1:
        document_starts = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=device)
        documents = (torch.arange(longest, device=device) >= document_starts).long()
    generators = [torch.Generator().manual_seed(derive_seed(sampling_params.seed, number)) for number in range(len(prompts))]
    finished = [False] * len(prompts)
    with enable_kv_cache(model, longest + max(token_budgets)) if use_cache else nullcontext(_CachedPrefix()) as prefix:
        for token_count in range(1, max(token_budgets) + 1):
            logits = gather_logits(model.compute_next_token_logits(tokens, documents)).float().cpu()
            if not logits.isfinite().all():
                raise TrainingError("the model outputs NaN or Inf", place="sample", hint="try an earlier checkpoint")
            prefix.cached_length = tokens.shape[1]
            sampled = [_sample_token(row, sampling_params, generator) for row, generator in zip(logits, generators, strict=True)]
            finished = [is_finished or token in eos_tokens for is_finished, token in zip(finished, sampled, strict=True)]
            yield [None if is_finished else token for is_finished, token in zip(finished, sampled, strict=True)]
            finished = [
                is_finished or is_done(number) or token_count == token_budgets[number] for number, is_finished in enumerate(finished)
            ]
            if all(finished):
                return
            tokens = torch.cat((tokens, torch.tensor(sampled, device=device)[:, None]), dim=1)
            if documents is not None:
                # After the end of a sequence, each further token is a separate document, so that no position exceeds the maximum.
                documents = torch.cat((documents, documents[:, -1:] + torch.tensor(finished, device=device)[:, None]), dim=1)


def _sample_token(logits: Tensor, sampling_params: SamplingParams, generator: torch.Generator) -> int:
    """Return a token sampled from the distribution with these `logits` (vocabulary)."""
    if not sampling_params.temperature:
        return int(logits.argmax())
    sorted_logits, tokens = ((logits - logits.max()) / sampling_params.temperature).sort(descending=True, stable=True)
    if sampling_params.top_k:
        sorted_logits = sorted_logits[: sampling_params.top_k]
    probabilities = sorted_logits.softmax(0)
    # The most likely token is always kept, regardless of top_p.
    probabilities[(probabilities.cumsum(0) - probabilities >= sampling_params.top_p).logical_and(torch.arange(len(probabilities)) > 0)] = 0
    return int(tokens[probabilities.multinomial(1, generator=generator)])


class _CachedPrefix:
    """The cached part of each sequence: its first `cached_length` tokens."""

    size = 1

    def __init__(self) -> None:
        self.cached_length = 0

    def select_ranges(self, length: int) -> tuple[range, ...] | None:
        """Return the positions of the new tokens in sequences of `length` tokens; None if all tokens are new."""
        return (range(self.cached_length, length),) if self.cached_length else None


class _LayerCache:
    """Cached keys and values of one attention layer."""

    def __init__(self, prefix: _CachedPrefix, capacity: int) -> None:
        self._prefix, self._capacity = prefix, capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, new_length, size = key.shape
        if self._buffers is None:
            self._buffers = key.new_empty(batch, heads, self._capacity, size), value.new_empty(batch, heads, self._capacity, size)
        end = self._prefix.cached_length + new_length
        for buffer, new_values in zip(self._buffers, (key, value), strict=True):
            buffer[:, :, self._prefix.cached_length : end] = new_values
        keys, values = self._buffers
        return keys[:, :, :end], values[:, :, :end]


@contextmanager
def enable_kv_cache(model: Transformer, capacity: int) -> Iterator[_CachedPrefix]:
    """Context manager that adds a KV cache to `model`, for up to `capacity` tokens per sequence.

    The cache stores the attention keys and values of earlier tokens, so that they are computed only once. The model uses it through the
    interface for context parallelism: it computes only a part of each sequence, the new tokens, and reads the keys and values of the other
    tokens from the cache. The context manager yields a _CachedPrefix. After each forward pass, the caller sets its `cached_length`.
    """
    previous, prefix = model.sequence_shard, _CachedPrefix()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    model.sequence_shard = prefix
    for layer in layers:
        layer.gather_key_value = _LayerCache(prefix, capacity)
    try:
        yield prefix
    finally:
        model.sequence_shard = previous
        for layer in layers:
            layer.gather_key_value = None
