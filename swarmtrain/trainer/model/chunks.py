"""The loss of many tokens, of which only some have their logits at a time.

Logits are the widest of all that a model makes: tokens x vocabulary, in float32. Nothing comes after the loss, so each
chunk's backward pass is made at once, up to the hidden states and the head's parameters, and the logits go. The backward
pass of the whole then multiplies by the gradient of the loss, a single number. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Of = Callable[[Tensor, Tensor], Tensor]
"""Maps hidden states (1, tokens, width) and targets (tokens) to the summed loss."""


def summed(of: Of, hidden: Tensor, targets: Tensor, parameters: Sequence[nn.Parameter], *, size: int, parts: int) -> Tensor:
    """Return the loss `of` all tokens, made of chunks of `size` of them.

    `hidden` (samples, this rank's part of a sequence, width), `targets` (samples, sequence). `parts`: how many ranks have a
    part of each sequence, which `of` puts one behind the other. `parameters`: those in `of`, to which gradients go.
    """
    flat, wanted = hidden.flatten(0, 1), targets.view(len(targets), parts, -1).transpose(0, 1).flatten(1)
    own = -(-size // parts)
    aims = [aim.flatten() for aim in torch.split(wanted, own, 1)]
    if not torch.is_grad_enabled():
        return torch.stack([of(part[None], aim) for part, aim in zip(torch.split(flat, own), aims, strict=True)]).sum()
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _Chunked.apply(flat, of, own, aims, *learned)  # type: ignore[no-untyped-call]  # torch's own is not typed
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, of: Of, own: int, targets: Sequence[Tensor], *parameters: nn.Parameter) -> Tensor:
        to_hidden = torch.empty_like(hidden)
        to_parameters = [torch.zeros_like(parameter) for parameter in parameters]
        losses = []
        for given, slopes, aims in zip(torch.split(hidden, own), torch.split(to_hidden, own), targets, strict=True):
            with torch.enable_grad():
                part = given.detach().requires_grad_()
                loss = of(part[None], aims)
            slope, *more = torch.autograd.grad(loss, (part, *parameters))
            slopes.copy_(slope)
            for whole, summand in zip(to_parameters, more, strict=True):
                whole.add_(summand)
            losses.append(loss.detach())
        ctx.save_for_backward(to_hidden, *to_parameters)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, *to_parameters = ctx.saved_tensors
        return to_hidden.mul_(gradient), None, None, None, *(slope.mul_(gradient) for slope in to_parameters)
