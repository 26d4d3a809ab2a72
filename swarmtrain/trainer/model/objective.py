"""Interface of training objectives, which compute the loss, and the default objective. It is the same for every form of parallelism.

`trainer/objectives/` contains the objectives that the config can select. Transformer, pipeline and training step use only the classes of
this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Objective:
    """An objective that computes the loss of a micro batch from the losses of its tokens; by default it is their sum.

    Subclasses override the members that differ. One instance serves all micro batches of a rank, on the rank's device.
    """

    loss_unit = "token"
    """Loss unit: the logged loss is the mean over these units. Their number is the number of loss tokens, or of samples if a sample has
    several rows."""
    has_accuracy = False
    """True if `pop_correct_count` returns a count; the accuracy is this count divided by the number of loss units."""
    has_perplexity = False
    """True if exp(mean loss) is the model's perplexity."""
    is_sum_over_tokens = True
    """True if the loss is a sum with one term per token. It can then be computed in chunks, which saves memory, and with context
    parallelism, where each rank has only a part of every sequence. False if the loss needs full sequences."""
    has_reference = False
    """True if each row is also processed by the reference model: the model without LoRA and adapters, and without gradients. Hidden states
    are those of all rows, then those of the reference model. `is_sum_over_tokens` must then be False."""

    def prepare_model(self, model: nn.Module) -> None:
        """Modify `model` in place as the objective requires. `model` is the full model, before it is parallelized."""

    def compute_loss(self, token_losses: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, a scalar that the backward pass differentiates.

        `token_losses`: cross-entropy of each token in nats, 0 for tokens without a target; one dimension, with all rows, then those of the
        reference model. `targets`: IGNORE_INDEX for tokens without a loss; (rows, sequence), or one dimension if the loss is
        a sum over tokens. The rows of a sample are consecutive. A sample without targets is padding, and its loss must be 0.
        """
        return token_losses.sum()

    def pop_correct_count(self) -> Tensor | None:
        """Return how many loss units were correct since the last call, and reset the counter. None if nothing was counted."""
        return None

    @property
    def copies_per_row(self) -> int:
        """Number of hidden states of each token: one for each model that processes it."""
        return 2 if self.has_reference else 1


class LanguageModelObjective(Objective):
    """Next-token prediction: the loss is the summed cross-entropy of the tokens."""

    has_perplexity = True


@dataclass(frozen=True)
class EmbeddingLoss:
    """The loss of this replica's part of a global batch, and the loss gradients of this replica's vectors."""

    loss: Tensor
    """Loss in nats, summed over this replica's samples, in float64."""
    correct_count: Tensor
    """Number of this replica's samples that count as correct in the accuracy."""
    vector_gradients: Tensor
    """Gradient of the loss over all replicas' samples with respect to each of this replica's vectors; same shape as the vectors."""

    def select_micro_batch_gradients(self, index: int, size: int) -> Tensor:
        """Return the vector gradients of micro batch `index` of this replica, which has `size` vectors.

        Zeros for a padding micro batch, which has no samples.
        """
        gradients = self.vector_gradients[index * size : (index + 1) * size]
        return gradients if len(gradients) else self.vector_gradients.new_zeros(size, 1)


class EmbeddingObjective(Objective, ABC):
    """An objective that compares the vectors of all texts of a global batch, for models with an embedding head.

    The loss is computed over the whole global batch, whatever the number of replicas and micro batches, with the memory of one micro batch
    (GradCache: Gao et al. 2021, arXiv 2101.06983). All vectors are first computed without gradients. Then the loss is differentiated with
    respect to the vectors, and each micro batch is recomputed and differentiated, with its part of those gradients. So the loss is the
    same in every topology, at the cost of one more forward pass. Dropout is a function of the step and the sample, so it drops the same
    elements in both passes.
    """

    is_sum_over_tokens = False

    @abstractmethod
    def compute_sample_losses(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each sample of a global batch its loss (differentiable), and whether it counts as correct in the accuracy.

        `vectors` (samples, rows per sample, dimensions): unit-length vectors; for each sample the vector of its text, then those of its
        positive and negative texts.
        """

    def compute_embedding_loss(
        self,
        vectors: Tensor,
        *,
        rows_per_sample: int,
        first_sample: int,
        global_batch_size: int,
        group: dist.ProcessGroup,
        first_counted_sample: int = 0,
    ) -> EmbeddingLoss:
        """Return this replica's part of the loss over the vectors of all replicas, and the gradients of this replica's vectors.

        Collective: the ranks of `group`, one rank per replica, must call it.

        `vectors` (this replica's samples x `rows_per_sample`, dimensions). `first_sample`: index of this replica's first sample in the
        global batch, which has `global_batch_size` samples. The loss and the accuracy do not include samples before `first_counted_sample`,
        to which the others are only compared.
        """
        local_vectors = vectors.view(-1, rows_per_sample, vectors.shape[1])
        local_slice = slice(first_sample, first_sample + len(local_vectors))
        all_vectors = vectors.new_zeros((global_batch_size, *local_vectors.shape[1:]))
        all_vectors[local_slice] = local_vectors
        dist.all_reduce(all_vectors, group=group)
        with torch.enable_grad():
            losses, correct = self.compute_sample_losses(all_vectors.requires_grad_())
            (gradients,) = torch.autograd.grad(losses.sum(), all_vectors)
        counted_slice = slice(max(first_sample, first_counted_sample), local_slice.stop)
        loss, correct_count = losses.detach()[counted_slice].double().sum(), correct[counted_slice].sum()
        return EmbeddingLoss(loss, correct_count, gradients[local_slice].flatten(0, 1))
