"""A decoder-only transformer: pre-normalisation, causal attention, and whatever else `transformer_architecture` says.

attention   queries, keys, values and what is mixed of them
rotary      positions that are told to attention
positions   positions that are added to the embedding
masks       which tokens see which, and the kernels that know
mlp         feed-forward blocks
norm        normalisation
dropout     dropout that no topology changes
initial     what parameters begin with
linear      products, in float8 where that is asked for
beside      what tunes a model, and is not its own
lora        narrow matrices beside layers
adapter     narrow blocks behind them
embedding   a head that makes one vector of a text
targets     what is to be learned
chunks      a loss that never has all logits
preference  a loss of pairs of answers

docs/explanation/model.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import chunks, dropout, masks, preference, umup
from swarmtrain.trainer.model.adapter import Adapters
from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.context import Context
from swarmtrain.trainer.model.dropout import Dropout
from swarmtrain.trainer.model.embedding import EmbeddingHead
from swarmtrain.trainer.model.initial import Initial, fill
from swarmtrain.trainer.model.masks import Masks
from swarmtrain.trainer.model.mlp import feed_forward
from swarmtrain.trainer.model.norm import norm
from swarmtrain.trainer.model.positions import Positions
from swarmtrain.trainer.model.rotary import Rotary, Rotation, starts
from swarmtrain.trainer.model.targets import IGNORE
from swarmtrain.trainer.runtime import derived_seed, seed_torch


class Around(NamedTuple):
    """What all layers of one forward pass share."""

    rotation: Rotation | None
    places: Tensor | None
    """For each of this rank's tokens (sequence), or (batch, sequence), its position; None where no position is added."""
    masks: Masks
    noise: Tensor | None
    """For each token within a block, where no sequence is divided by layers, the number from which its dropout follows (see
    dropout.noise); None without dropout."""
    noise_between: Tensor | None
    """The same of this rank's tokens between blocks."""


class Transformer(nn.Module):
    """Maps tokens (batch, sequence) to logits (batch, sequence, vocabulary).

    It is made without values, on torch's device `meta`; `parallelize` gives each rank those of its part, `fill` all of them.
    """

    def __init__(self, shape: TransformerArchitectureConfig, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.initial: Callable[[str, torch.Size], Tensor] = Initial(shape, seed)
        """Gives the whole of a parameter by its name and size, before anything is learned."""
        self.tied = shape.tied
        self.sequence_part = (0, 1)
        """Which part of each sequence this rank has between blocks, and how many there are (sequence parallelism)."""
        self.place = (0, 0)
        """This rank's first layer and its number among those that share its layers."""
        self.loss_chunk: int | None = None
        """Tokens whose logits are there at a time. None: all."""
        self.preference: preference.Preference | None = None
        """Learn from pairs: see preference.py."""
        self.context: Context | None = None
        """Who shares each sequence with this rank."""
        self.embedding_dropout = Dropout(shape.dropout_embedding, "embedding")
        self.rotary = Rotary(shape)
        with torch.device("meta"):
            self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
            self.positions = Positions(shape) if shape.learned_positions else None
            self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
            self.norm = norm(shape.hidden_size, shape)
            vectors = shape.embedding_head_config
            self.head: nn.Module = EmbeddingHead(shape, vectors) if vectors else umup.head(shape)
        self.loss: nn.Module = Loss()
        if self.tied:
            self.head.weight = self.embedding.weight

    def fill(self, device: torch.device | None = None) -> Transformer:
        """Give all parameters their values, on `device`, and return this model."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        sizes = {name: parameter.shape for parameter, name in names.items()}
        fill(self, names, lambda name: self.initial(name, sizes[name]), device or torch.device("cpu"))
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits; or, given `targets` (batch, sequence; IGNORE where there is none), the summed loss in nats, or vectors
        (see EmbeddingHead) if that is the head.

        `documents` (batch, sequence) has the number of each token's document, where the model is to tell them apart.
        If the head is divided over ranks, the logits are those of this rank's part of the vocabulary; if sequences are,
        logits and loss are those of this rank's part of them.
        """
        if self.preference is not None:
            tokens, documents = preference.twice(tokens, documents)
        length = self._length(tokens)
        places = None if self.context is None else self.context.places(length, tokens.device)
        if places is not None and targets is not None:
            targets = targets[:, places]
        hidden = self._hidden(tokens, length, documents, places)
        if targets is None:
            logits: Tensor = self.head(hidden)
            return logits
        if self.shape.embedding_head_config is not None:
            vectors: Tensor = self.head(hidden, targets=targets)
            return vectors
        if self.preference is not None:
            return self.preference.loss(self._losses(hidden, targets.repeat(2, 1)), targets)
        if self.loss_chunk is None or targets.numel() <= self.loss_chunk:
            return self._summed(hidden, targets)
        here = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        parameters = list(self.head.parameters())
        return chunks.summed(self._summed, here, targets, parameters, size=self.loss_chunk, parts=self.sequence_part[1])

    def last(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits (batch, vocabulary) after the last of `tokens`; see `forward`."""
        length = self._length(tokens)
        places = None if self.context is None else self.context.places(length, tokens.device)
        with preference.all_tuned(self):
            logits: Tensor = self.head(self._hidden(tokens, length, documents, places)[:, -1:])
        return logits[:, -1]

    def _hidden(self, tokens: Tensor, length: int, documents: Tensor | None, places: Tensor | None) -> Tensor:
        """Return what the head is given: of the tokens at `places` of sequences of `length`, if this rank has not all."""
        if places is not None and tokens.dim() == 2:
            tokens = tokens[:, places]
        around = self._around(tokens, length, documents, places)
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = self.positions(hidden, around.places)
        hidden = self.embedding_dropout(hidden, around.noise_between)
        for block in self.blocks:
            hidden = block(hidden, around=around)
        normalised: Tensor = self.norm(hidden)
        return normalised

    def _summed(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self._losses(hidden, targets).sum()

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each of `targets`, in one row."""
        logits: Tensor = self.head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses: Tensor = self.loss(logits.flatten(0, 1), targets.flatten())
        return losses

    def _length(self, given: Tensor) -> int:
        """Return the length of whole sequences. `given` is tokens, or what a pipeline's stage before has made of its part of them."""
        divided = self.sequence_part[1] * (self.context.size if self.context else 1)
        return given.shape[1] * (1 if given.dim() == 2 else divided)

    def _around(self, given: Tensor, length: int, documents: Tensor | None, places: Tensor | None) -> Around:
        """Return what the layers share, for sequences of `length`.

        `places`: those of this rank's tokens in their sequences; None if it has whole sequences.
        """
        apart = documents if self.shape.reset_attention_mask else None
        first = starts(documents) if documents is not None and self.shape.reset_position_ids else None
        rotation = self.rotary(length, first)
        if rotation is not None and places is not None:
            rotation = rotation[0][..., places, :], rotation[1][..., places, :]
        part, parts = self.sequence_part
        within = torch.arange(length, device=given.device) if places is None else places
        mine = within.view(parts, -1)[part]
        noise = dropout.noise(given.shape[0], within) if self.shape.drops else None
        between = None if noise is None else noise.view(len(noise), parts, -1)[:, part]
        added = None
        if self.positions is not None:
            added = mine if first is None else mine - first[:, mine]
        if self.shape.dropout_attention_probs:
            seed_torch(derived_seed(torch.initial_seed(), *self.place))
        seen = masks.build(self.shape, given.shape[0], length, apart, given.device, places=places)
        return Around(rotation, added, seen, noise, between)


class Loss(nn.Module):
    """Maps logits (tokens, vocabulary) and targets (tokens) to each token's loss in nats, zero for IGNORE. The logits are used up."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = _CrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]  # torch's own is not typed
        return loss


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy in the logits' own memory. torch's own makes their logarithms beside them, and their gradient beside both."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        counts = targets != IGNORE
        columns = torch.where(counts, targets, 0)
        shifted = logits.detach().sub_(logits.amax(1, keepdim=True))
        wanted = shifted.gather(1, columns[:, None]).squeeze(1)
        weights = shifted.exp_()
        sums = weights.sum(1)
        ctx.save_for_backward(weights, sums, columns, counts)
        return torch.where(counts, sums.log() - wanted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weights, sums, columns, counts = ctx.saved_tensors
        gradients = torch.where(counts, gradient, 0)
        weights.mul_((gradients / sums)[:, None])
        weights[torch.arange(len(columns), device=columns.device), columns] -= gradients
        return weights, None


class Block(nn.Module):
    """Attention and a feed-forward network, each beside the residual stream."""

    def __init__(self, shape: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = norm(shape.hidden_size, shape)
        self.attention = Attention(shape, layer)
        self.attention_dropout = Dropout(shape.dropout_after_attention, f"{layer} attention")
        self.mlp_norm = norm(shape.hidden_size, shape)
        self.mlp = feed_forward(shape, layer)
        self.mlp_dropout = Dropout(shape.dropout_after_mlp, f"{layer} mlp")
        self.drops_within = bool(shape.lora_config and shape.lora_config.dropout)
        self.adapter = Adapters(shape)
        self.parallel = shape.parallel_residual
        self.scales = umup.residual_scales(shape, layer) if shape.umup.enable else None

    def forward(self, hidden: Tensor, *, around: Around) -> Tensor:
        if self.parallel:
            return hidden + self._attended(hidden, around) + self._transformed(hidden, around)
        if self.scales is None:
            hidden = hidden + self._attended(hidden, around)
            return hidden + self._transformed(hidden, around)
        (branch, stream), (branch_after, stream_after) = self.scales
        # A branch's factor comes at its end on the way there and at its beginning on the way back: within it is unit scale.
        hidden = hidden * stream + umup.scaled(self._attended(umup.scaled(hidden, 1.0, branch), around), branch)
        return hidden * stream_after + umup.scaled(self._transformed(umup.scaled(hidden, 1.0, branch_after), around), branch_after)

    def _attended(self, hidden: Tensor, around: Around) -> Tensor:
        # By keyword: tensor parallelism changes what comes by place.
        mixed = self.attention(self.attention_norm(hidden), rotation=around.rotation, masks=around.masks, noise=around.noise)
        return self.adapter.of("after_attention", self.attention_dropout(mixed, around.noise_between))

    def _transformed(self, hidden: Tensor, around: Around) -> Tensor:
        # Of a block of one's own nothing is asked that only LoRA needs.
        within = {"noise": around.noise} if self.drops_within else {}
        made = self.mlp(self.mlp_norm(hidden), **within)
        return self.adapter.of("after_mlp", self.mlp_dropout(made, around.noise_between))
