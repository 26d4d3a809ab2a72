"""Cross-entropy loss over many tokens, with the logits of only one chunk of tokens in memory at a time.

Logits are the largest activation of a model: tokens x vocabulary, in float32. Since the loss is the last operation of the forward pass,
the backward pass of each chunk can run right after its loss is computed, down to the hidden states and the head's parameters. Then the
chunk's logits are freed. The model's backward pass only multiplies these gradients by the gradient of the loss, a scalar. Nothing is
computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps hidden states (1, tokens, hidden size) and targets (tokens) to the summed loss."""


def compute_chunked_loss(
    loss_function: LossFunction,
    hidden: Tensor,
    targets: Tensor,
    parameters: Sequence[nn.Parameter],
    *,
    chunk_size: int,
    sequence_shards: int,
) -> Tensor:
    """Return the summed loss of all tokens, computed in chunks of `chunk_size` tokens.

    `hidden` (samples, this rank's part of the sequence, hidden size), `targets` (samples, full sequence). `sequence_shards`: number of
    ranks that each hold a part of every sequence; `loss_function` gathers and concatenates these parts. `parameters`: the parameters
    that `loss_function` uses; they receive gradients.
    """
    flat_hidden, ordered_targets = hidden.flatten(0, 1), targets.view(len(targets), sequence_shards, -1).transpose(0, 1).flatten(1)
    local_chunk_size = -(-chunk_size // sequence_shards)
    target_chunks = [target_chunk.flatten() for target_chunk in torch.split(ordered_targets, local_chunk_size, 1)]
    if not torch.is_grad_enabled():
        return torch.stack(
            [
                loss_function(hidden_chunk[None], target_chunk)
                for hidden_chunk, target_chunk in zip(torch.split(flat_hidden, local_chunk_size), target_chunks, strict=True)
            ]
        ).sum()
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ChunkedLoss.apply(flat_hidden, loss_function, local_chunk_size, target_chunks, *trainable)  # type: ignore[no-untyped-call]  # not typed in torch
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, loss_function: LossFunction, chunk_size: int, targets: Sequence[Tensor], *parameters: nn.Parameter
    ) -> Tensor:
        hidden_gradient = torch.empty_like(hidden)
        # The sum over chunks is rounded to the type of the parameters only at its end.
        parameter_gradients = [
            torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)) for parameter in parameters
        ]
        losses = []
        for hidden_chunk, hidden_gradient_chunk, target_chunk in zip(
            torch.split(hidden, chunk_size), torch.split(hidden_gradient, chunk_size), targets, strict=True
        ):
            with torch.enable_grad():
                leaf = hidden_chunk.detach().requires_grad_()
                loss = loss_function(leaf[None], target_chunk)
            chunk_gradient, *parameter_chunk_gradients = torch.autograd.grad(loss, (leaf, *parameters))
            hidden_gradient_chunk.copy_(chunk_gradient)
            for total, summand in zip(parameter_gradients, parameter_chunk_gradients, strict=True):
                total.add_(summand)
            losses.append(loss.detach())
        ctx.save_for_backward(hidden_gradient, *parameter_gradients)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, *parameter_gradients = ctx.saved_tensors
        return (
            hidden_gradient.mul_(gradient),
            None,
            None,
            None,
            *(parameter_gradient.mul_(gradient) for parameter_gradient in parameter_gradients),  # autograd casts them
        )
