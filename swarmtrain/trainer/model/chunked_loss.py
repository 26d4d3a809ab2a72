"""Cross-entropy loss over many tokens, with the logits of only one chunk of tokens in memory at a time.

Logits are the largest activation of a model: tokens x vocabulary, in float32. If the loss is a sum over tokens, the last operation of the
forward pass, the backward pass of each chunk can run right after its loss is computed, down to the hidden states and the head's parameters.
Then the chunk's logits are freed. The model's backward pass only multiplies these gradients by the gradient of the loss, a scalar. Nothing
is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps hidden states (1, tokens, hidden size) and targets (tokens) to the summed loss, or to the loss of each token."""


_MIN_CHUNK_SIZE, _LOGITS_PER_CHUNK = 2048, 2**28


def compute_default_chunk_size(vocabulary_size: int) -> int:
    """Return the number of tokens in a chunk: at least 2048, and a power of two.

    The gradient of the output layer is accumulated once per chunk, so more tokens are faster. With a smaller vocabulary, more tokens have
    the same number of logits, and so need the same memory.
    """
    fitting = max(1, _LOGITS_PER_CHUNK // vocabulary_size)
    return max(_MIN_CHUNK_SIZE, 1 << fitting.bit_length() - 1)


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
    hidden_chunks, target_chunks = _divide_into_chunks(hidden, targets, chunk_size, sequence_shards)
    flat_targets = [chunk.flatten() for chunk in target_chunks]
    if not torch.is_grad_enabled():
        return torch.stack([loss_function(chunk[None], target) for chunk, target in zip(hidden_chunks, flat_targets, strict=True)]).sum()
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ChunkedLoss.apply(hidden.flatten(0, 1), loss_function, len(hidden_chunks[0]), flat_targets, *trainable)  # type: ignore[no-untyped-call]  # not typed in torch
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


def compute_token_losses(loss_function: LossFunction, hidden: Tensor, targets: Tensor, *, chunk_size: int, sequence_shards: int) -> Tensor:
    """Return the loss of each token, flattened to one dimension, computed in chunks of `chunk_size` tokens.

    Arguments as for compute_chunked_loss, except that `loss_function` returns the loss of each token. The gradients depend on what is
    computed from the losses, so the logits of each chunk are computed again in the backward pass.
    """
    flat_hidden, target_chunks = _divide_into_chunks(hidden, targets, chunk_size, sequence_shards)
    losses = [
        checkpoint(loss_function, hidden_chunk[None], target_chunk.flatten(), use_reentrant=False).view(sequence_shards, -1)
        for hidden_chunk, target_chunk in zip(flat_hidden, target_chunks, strict=True)
    ]
    return torch.cat(losses, dim=1).view(sequence_shards, len(targets), -1).transpose(0, 1).flatten()


def _divide_into_chunks(
    hidden: Tensor, targets: Tensor, chunk_size: int, sequence_shards: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the chunks of this rank's hidden states (tokens, hidden size), and of the targets (sequence shards, tokens)."""
    ordered_targets = targets.view(len(targets), sequence_shards, -1).transpose(0, 1).flatten(1)
    local_chunk_size = -(-chunk_size // sequence_shards)
    return torch.split(hidden.flatten(0, 1), local_chunk_size), torch.split(ordered_targets, local_chunk_size, 1)
