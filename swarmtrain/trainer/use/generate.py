"""Tokens after tokens: each is drawn from what the model gives those before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.runtime import derived_seed
from swarmtrain.trainer.use.cache import Seen, cached

Whole = Callable[[Tensor], Tensor]
"""Makes logits of this rank's part of the vocabulary those of all of it."""


@dataclass(frozen=True)
class How:
    """How tokens are drawn."""

    temperature: float = 1.0
    """What logits are divided by. 0: the likeliest token is taken."""
    top_k: int = 0
    """Of so many of the likeliest tokens; 0: of all."""
    top_p: float = 1.0
    """Of the fewest tokens that have this much of the probability together (Holtzman et al. 2019, arXiv 1904.09751)."""
    seed: int = 0


def encoded(encoder: Encoder, text: str, longest: int, place: str) -> list[int]:
    """Return the tokens of a prompt. Raises TrainingError if there are none, or `longest` and more."""
    [found] = encoder.encode([text], special=True)
    if not len(found.tokens):
        raise TrainingError("a prompt holds nothing", place=place, hint="one character will do")
    if len(found.tokens) >= longest:
        reason = f"a prompt has {len(found.tokens)} tokens, and the model was made for {longest} at most"
        raise TrainingError(reason, place=place, hint="shorten it")
    return [int(token) for token in found.tokens]


def of_all(group: dist.ProcessGroup) -> Whole:
    """Return what puts the logits (batch, vocabulary) together of which each rank of `group` has a part."""

    def together(logits: Tensor) -> Tensor:
        if group.size() == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    return together


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    how: How,
    *,
    most: int,
    ends: Collection[int] = (),
    whole: Whole = lambda logits: logits,
    done: Callable[[int], bool] = lambda prompt: False,
    cache: bool = True,
) -> Iterator[list[int | None]]:
    """Yield the next token of each of `prompts`, None for those that have ended, up to `most` times.

    One ends with a token of `ends`, which is not given, or when `done` says so of its number. No sequence gets longer than the
    model's `sequence_length`. Prompts of several lengths are filled up in front, with a document that they do not see: the model's
    `shape` must tell documents apart. What is drawn for a prompt depends on its number and `how.seed`, not on the others.
    Raises TrainingError if what the model gives is no number.
    """
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    rooms = [min(most, model.shape.sequence_length - len(prompt)) for prompt in prompts]
    tokens = torch.stack([pad(torch.tensor(prompt), (longest - len(prompt), 0)) for prompt in prompts]).to(device)
    documents = None
    if len({len(prompt) for prompt in prompts}) > 1:
        starts = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=device)
        documents = (torch.arange(longest, device=device) >= starts).long()
    generators = [torch.Generator().manual_seed(derived_seed(how.seed, number)) for number in range(len(prompts))]
    ended = [False] * len(prompts)
    with cached(model, longest + max(rooms)) if cache else nullcontext(Seen()) as seen:
        for made in range(1, max(rooms) + 1):
            logits = whole(model.last(tokens, documents)).float().cpu()
            if not logits.isfinite().all():
                raise TrainingError("the model gives what is no number", place="sample", hint="an earlier checkpoint may be sound")
            seen.count = tokens.shape[1]
            drawn = [_drawn(row, how, generator) for row, generator in zip(logits, generators, strict=True)]
            ended = [over or token in ends for over, token in zip(ended, drawn, strict=True)]
            yield [None if over else token for over, token in zip(ended, drawn, strict=True)]
            ended = [over or done(number) or made == rooms[number] for number, over in enumerate(ended)]
            if all(ended):
                return
            tokens = torch.cat((tokens, torch.tensor(drawn, device=device)[:, None]), dim=1)
            if documents is not None:
                # What comes after the end of one is a document a token: no position gets higher than there are.
                documents = torch.cat((documents, documents[:, -1:] + torch.tensor(ended, device=device)[:, None]), dim=1)


def _drawn(logits: Tensor, how: How, generator: torch.Generator) -> int:
    """Return a token drawn by its `logits` (vocabulary)."""
    if not how.temperature:
        return int(logits.argmax())
    ordered, tokens = ((logits - logits.max()) / how.temperature).sort(descending=True, stable=True)
    if how.top_k:
        ordered = ordered[: how.top_k]
    chances = ordered.softmax(0)
    # The first of them stays whatever top_p says.
    chances[(chances.cumsum(0) - chances >= how.top_p).logical_and(torch.arange(len(chances)) > 0)] = 0
    return int(tokens[chances.multinomial(1, generator=generator)])
