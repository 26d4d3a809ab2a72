"""Tokens after tokens: each is drawn from what the model gives those before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmtrain.trainer.model.transformer import Transformer
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
    ordered, tokens = (logits / how.temperature).sort(descending=True, stable=True)
    if how.top_k:
        ordered = ordered[: how.top_k]
    chances = ordered.softmax(0)
    # The first of them stays whatever top_p says.
    chances[(chances.cumsum(0) - chances >= how.top_p).logical_and(torch.arange(len(chances)) > 0)] = 0
    return int(tokens[chances.multinomial(1, generator=generator)])
