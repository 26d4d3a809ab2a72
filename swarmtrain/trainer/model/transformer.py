"""A decoder-only transformer: pre-normalization, causal attention, and the options of `transformer_architecture`.

attention            queries, keys, values and their weighted sum
positions            rotary and learned position embeddings
mlp                  feed-forward blocks (MLP)
dropout              dropout that is the same in every topology
initialization       initial parameter values
layers               normalization, linear layers (in float8 where configured), and the output layer
float8               float8 matmuls
umup                 u-muP scaling
peft                 parameters added for fine-tuning: LoRA and adapters
embedding_head       one vector per text
loss_targets         the target value of positions without a loss
chunked_loss         loss computed without materializing all logits
objective            the interface of training objectives, which compute the loss
sequence_shard       the interface for ranks that have a part of each sequence

docs/explanation/model.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.trainer import AttentionKernel
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import chunked_loss, dropout, umup
from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.attention.selection import AttentionMethods, build_attention_methods
from swarmtrain.trainer.model.attention.visibility import Visibility
from swarmtrain.trainer.model.dropout import Dropout
from swarmtrain.trainer.model.embedding_head import EmbeddingHead
from swarmtrain.trainer.model.initialization import ParameterInitializer, ParameterSource, materialize_parameters, write_parameters
from swarmtrain.trainer.model.layers import build_norm, build_output_layer
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.mlp import build_mlp
from swarmtrain.trainer.model.objective import Objective
from swarmtrain.trainer.model.peft import LayerAdapters, LoraAdapters
from swarmtrain.trainer.model.positions import LearnedPositions, RotaryEmbedding, Rotation, find_document_starts
from swarmtrain.trainer.model.sequence_shard import SequenceShard
from swarmtrain.trainer.random_seeds import derive_seed, seed_torch


class ForwardContext(NamedTuple):
    """Inputs that all layers share in one forward pass."""

    rotation: Rotation | None
    position_ids: Tensor | None
    """Position of each token of this rank, (sequence) or (batch, sequence); None without learned positions."""
    attention_methods: AttentionMethods
    noise: Tensor | None
    """Dropout noise (batch, sequence) inside attention and feed-forward blocks; None without dropout.

    Inside blocks, sequence parallelism has gathered the full sequence. See dropout.compute_token_noise.
    """
    residual_noise: Tensor | None
    """Dropout noise (batch, sequence) between blocks, where a rank has only its part of the sequence (sequence parallelism).

    None without dropout.
    """
    has_reference: bool
    """Whether the second half of the batch is processed by the reference model."""


class Transformer(nn.Module):
    """Decoder-only transformer: maps tokens (batch, sequence) to logits (batch, sequence, vocabulary), or to a loss.

    Its parameters are created on torch's meta device, without values. `parallelize` materializes this rank's shard, `init_weights` the
    full model.
    """

    def __init__(self, architecture: TransformerArchitectureConfig, seed: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.initial_values: ParameterSource = ParameterInitializer(architecture, seed)
        """The values of the parameters, before a checkpoint is loaded."""
        self.has_tied_embeddings = architecture.has_tied_embeddings
        self.sequence_parallel_coordinate = (0, 1)
        """With sequence parallelism: index of this rank's part of each sequence between blocks, and the number of parts."""
        self.model_coordinate = (0, 0)
        """Index of this rank's first layer, and this rank's index among the ranks that hold the same layers."""
        self.loss_chunk_size: int | None = None
        """Number of tokens whose logits are materialized at a time. None: all tokens at once."""
        self.attention_kernel = AttentionKernel.auto
        self.objective = Objective()
        """Computes the loss from the losses of the tokens."""
        self.refresh_weights: Callable[[], None] = _do_nothing
        """Called before each forward pass: brings weights up to date that are cast from parameters of a higher precision."""
        self.sequence_shard: SequenceShard | None = None
        """The ranks that share each sequence with this rank (context parallelism)."""
        self.embedding_dropout = Dropout(architecture.dropout_embedding, "embedding")
        self.rotary = RotaryEmbedding(architecture)
        with torch.device("meta"):
            embedding = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
            self.embedding: nn.Module = embedding
            self.positions = LearnedPositions(architecture) if architecture.learned_positions else None
            self.blocks = nn.ModuleList(TransformerBlock(architecture, layer) for layer in range(architecture.num_layers))
            self.norm = build_norm(architecture.hidden_size, architecture)
            embedding_head_config = architecture.embedding_head_config
            self.head: nn.Module = (
                EmbeddingHead(architecture, embedding_head_config) if embedding_head_config else build_output_layer(architecture)
            )
        self.loss: nn.Module = InPlaceCrossEntropyLoss()
        if self.has_tied_embeddings:
            self.head.weight = embedding.weight

    def init_weights(self, device: torch.device | None = None) -> Transformer:
        """Initialize all parameters on `device` (default: CPU), and return this model."""
        materialize_parameters(self, device or torch.device("cpu"))
        write_parameters(self.initial_values, dict(self.named_parameters()))
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits, or if `targets` is given the summed loss in nats, or the text vectors of an embedding head.

        `targets` (batch, sequence): IGNORE_INDEX for positions without a loss. `documents` (batch, sequence): the document id of each
        token, for models that mask attention between documents or count positions per document.

        If the output layer is tensor-parallel, logits are those of this rank's vocabulary shard. With context parallelism, logits and
        loss are those of this rank's part of the sequences.
        """
        length = self._infer_sequence_length(tokens)
        ranges = None if self.sequence_shard is None else self.sequence_shard.select_ranges(length)
        if ranges is not None and targets is not None:
            targets = _select_positions(targets, ranges, dim=1)
        hidden = self._compute_hidden_states(tokens, length, documents, ranges, has_reference=self.objective.has_reference)
        if targets is None:
            logits: Tensor = self.head(hidden)
            return logits
        if self.architecture.embedding_head_config is not None:
            vectors: Tensor = self.head(hidden, targets=targets)
            return vectors
        if not self.objective.is_sum_over_tokens or self.loss_chunk_size is None or targets.numel() <= self.loss_chunk_size:
            return self._compute_loss(hidden, targets)
        parameters = list(self.head.parameters())
        return chunked_loss.compute_chunked_loss(
            self._compute_loss,
            hidden,
            targets,
            parameters,
            chunk_size=self.loss_chunk_size,
            sequence_shards=self.sequence_parallel_coordinate[1],
        )

    def compute_next_token_logits(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits (batch, vocabulary) for the token that follows the last of `tokens`. For `documents`, see `forward`."""
        length = self._infer_sequence_length(tokens)
        ranges = None if self.sequence_shard is None else self.sequence_shard.select_ranges(length)
        logits: Tensor = self.head(self._compute_hidden_states(tokens, length, documents, ranges, has_reference=False)[:, -1:])
        return logits[:, -1]

    def _compute_hidden_states(
        self, tokens: Tensor, length: int, documents: Tensor | None, ranges: tuple[range, ...] | None, *, has_reference: bool
    ) -> Tensor:
        """Return the input of the head (batch, sequence, hidden size).

        `ranges`: positions of this rank's tokens in sequences of `length` tokens; None: all tokens. `has_reference`: also return the hidden
        states of the reference model, as a second half of the batch.
        """
        if ranges is not None and tokens.dim() == 2:
            tokens = _select_positions(tokens, ranges, dim=1)
        self.refresh_weights()
        hidden = self.embedding(tokens)
        context = self._build_forward_context(tokens, length, documents, ranges, hidden.dtype, has_reference=has_reference)
        if self.positions is not None:
            hidden = self.positions(hidden, context.position_ids)
        if tokens.dim() == 2:  # else hidden states from the previous pipeline stage
            dropped = self.embedding_dropout(hidden, context.residual_noise)
            hidden = torch.cat((dropped, hidden.detach())) if has_reference else dropped
        for block in self.blocks:
            hidden = block(hidden, context=context)
        normalized: Tensor = self.norm(hidden)
        return normalized

    def _compute_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the objective's summed loss. `hidden` also has the hidden states of the reference model, if the objective needs them."""
        if not self.objective.has_reference:
            return self.objective.compute_loss(self._compute_all_token_losses(hidden, targets), targets)
        hidden, reference = hidden.chunk(2)
        losses = self._compute_all_token_losses(hidden, targets)
        with torch.no_grad():
            reference_losses = self._compute_all_token_losses(reference, targets)
        return self.objective.compute_loss(torch.cat((losses, reference_losses)), targets)

    def _compute_all_token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in nats of each target, flattened to one dimension, with the logits of one chunk in memory at a time."""
        if self.objective.is_sum_over_tokens or self.loss_chunk_size is None or targets.numel() <= self.loss_chunk_size:
            return self.compute_token_losses(hidden, targets)
        return chunked_loss.compute_token_losses(
            self.compute_token_losses,
            hidden,
            targets,
            chunk_size=self.loss_chunk_size,
            sequence_shards=self.sequence_parallel_coordinate[1],
        )

    def compute_token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in nats of each target, flattened to one dimension."""
        logits: Tensor = self.head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses: Tensor = self.loss(logits.flatten(0, 1), targets.flatten())
        return losses

    def _infer_sequence_length(self, inputs: Tensor) -> int:
        """Return the length of the full sequences.

        `inputs`: token ids, or hidden states from the previous pipeline stage, which cover this rank's part.
        """
        shard_count = self.sequence_parallel_coordinate[1] * (self.sequence_shard.size if self.sequence_shard else 1)
        return inputs.shape[1] * (1 if inputs.dim() == 2 else shard_count)

    def _build_forward_context(
        self,
        inputs: Tensor,
        length: int,
        documents: Tensor | None,
        ranges: tuple[range, ...] | None,
        dtype: torch.dtype,
        *,
        has_reference: bool,
    ) -> ForwardContext:
        """Return the inputs that all layers share, for sequences of `length` tokens, whose hidden states have the type `dtype`.

        `ranges`: positions of this rank's tokens in their sequences; None if this rank has full sequences.
        """
        attention_documents = documents if self.architecture.reset_attention_mask else None
        batch_size = len(inputs) // 2 if has_reference and inputs.dim() == 3 else len(inputs)
        visibility = Visibility(batch_size, length, inputs.device, attention_documents, query_ranges=ranges)
        document_starts = find_document_starts(documents) if documents is not None and self.architecture.reset_position_ids else None
        rotation = self.rotary(length, dtype, document_starts)
        if rotation is not None and ranges is not None:
            rotation = _select_positions(rotation[0], ranges, dim=-2), _select_positions(rotation[1], ranges, dim=-2)
        shard_index, shard_count = self.sequence_parallel_coordinate
        token_positions = visibility.compute_query_positions()
        local_positions = token_positions.view(shard_count, -1)[shard_index]
        noise = dropout.compute_token_noise(batch_size, token_positions) if self.architecture.has_dropout else None
        residual_noise = None if noise is None else noise.view(len(noise), shard_count, -1)[:, shard_index]
        position_ids = None
        if self.positions is not None:
            position_ids = local_positions if document_starts is None else local_positions - document_starts[:, local_positions]
        if self.architecture.dropout_attention_probs:
            seed_torch(derive_seed(torch.initial_seed(), *self.model_coordinate))
        methods = build_attention_methods(self.architecture, visibility, dtype, self.attention_kernel)
        return ForwardContext(rotation, position_ids, methods, noise, residual_noise, has_reference)


def _do_nothing() -> None: ...


def _pass_through(values: Tensor) -> Tensor:
    return values


def _select_positions(values: Tensor, ranges: tuple[range, ...], dim: int) -> Tensor:
    """Return the parts of `values` at the positions `ranges` of the dimension `dim`."""
    return torch.cat([values.narrow(dim, each.start, len(each)) for each in ranges], dim)


class InPlaceCrossEntropyLoss(nn.Module):
    """Maps logits (tokens, vocabulary) and targets (tokens) to the loss of each token in nats, 0 for IGNORE_INDEX.

    The logits are overwritten.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = _InPlaceCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]  # not typed in torch
        return loss


class _InPlaceCrossEntropy(torch.autograd.Function):
    """Cross-entropy computed in the memory of the logits.

    torch's implementation also allocates log-probabilities and a gradient of the same size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        valid = targets != IGNORE_INDEX
        columns = torch.where(valid, targets, 0)
        shifted = logits.detach().sub_(logits.amax(1, keepdim=True))
        target_logits = shifted.gather(1, columns[:, None]).squeeze(1)
        exponentials = shifted.exp_()
        sums = exponentials.sum(1)
        ctx.save_for_backward(exponentials, sums, columns, valid)
        return torch.where(valid, sums.log() - target_logits, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exponentials, sums, columns, valid = ctx.saved_tensors
        gradients = torch.where(valid, gradient, 0)
        exponentials.mul_((gradients / sums)[:, None])
        exponentials[torch.arange(len(columns), device=columns.device), columns] -= gradients
        return exponentials, None


class TransformerBlock(nn.Module):
    """Transformer block: attention and a feed-forward block, each added to the residual stream."""

    def __init__(self, architecture: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(architecture.hidden_size, architecture)
        self.attention = Attention(architecture, layer)
        self.attention_dropout = Dropout(architecture.dropout_after_attention, f"{layer} attention")
        self.mlp_norm = build_norm(architecture.hidden_size, architecture)
        self.mlp = build_mlp(architecture, layer)
        self.mlp_dropout = Dropout(architecture.dropout_after_mlp, f"{layer} mlp")
        self.has_inner_dropout = bool(architecture.lora_config and architecture.lora_config.dropout)
        self.adapter = LayerAdapters(architecture)
        self.parallel_residual = architecture.parallel_residual
        self.prepare_attention_input: Callable[[Tensor], Tensor] = _pass_through
        self.prepare_mlp_input: Callable[[Tensor], Tensor] = _pass_through
        """Called with the normalized input of attention and of the feed-forward block: the place for tensor parallelism."""
        self.scales = umup.compute_residual_scales(architecture, layer) if architecture.umup.enable else None

    def forward(self, hidden: Tensor, *, context: ForwardContext) -> Tensor:
        """Return the hidden states after this block, with the shape of `hidden`."""
        if not context.has_reference:
            return self.compute_hidden(hidden, context)
        hidden, reference = hidden.chunk(2)
        with torch.no_grad(), self._disable_adapters():
            reference = self.compute_hidden(reference, context._replace(noise=None, residual_noise=None))
        return torch.cat((self.compute_hidden(hidden, context), reference))

    @contextmanager
    def _disable_adapters(self) -> Iterator[None]:
        modules = [module for module in self.modules() if isinstance(module, LoraAdapters | LayerAdapters)]
        for module in modules:
            module.is_enabled = False
        try:
            yield
        finally:
            for module in modules:
                module.is_enabled = True

    def compute_hidden(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the hidden states after this block, for one model."""
        if self.parallel_residual:
            return hidden + self._run_attention(hidden, context) + self._run_mlp(hidden, context)
        if self.scales is None:
            hidden = hidden + self._run_attention(hidden, context)
            return hidden + self._run_mlp(hidden, context)
        (attention_branch, attention_stream), (mlp_branch, mlp_stream) = self.scales
        # A branch's factor applies to its output in the forward pass and to its input's gradient in the backward pass: inside the branch,
        # values and gradients have unit scale.
        hidden = hidden * attention_stream + umup.scale_values_and_gradients(
            self._run_attention(umup.scale_values_and_gradients(hidden, 1.0, attention_branch), context), attention_branch
        )
        return hidden * mlp_stream + umup.scale_values_and_gradients(
            self._run_mlp(umup.scale_values_and_gradients(hidden, 1.0, mlp_branch), context), mlp_branch
        )

    def _run_attention(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        # By keyword: tensor parallelism transforms positional arguments.
        attended = self.attention(
            self.prepare_attention_input(self.attention_norm(hidden)),
            rotation=context.rotation,
            methods=context.attention_methods,
            noise=context.noise,
        )
        return self.adapter.apply_adapter("after_attention", self.attention_dropout(attended, context.residual_noise))

    def _run_mlp(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        # `noise` is used only by LoRA's dropout, so a custom block need not accept it.
        mlp_options = {"noise": context.noise} if self.has_inner_dropout else {}
        output = self.mlp(self.prepare_mlp_input(self.mlp_norm(hidden)), **mlp_options)
        return self.adapter.apply_adapter("after_mlp", self.mlp_dropout(output, context.residual_noise))
