"""The interface between an objective (what a model is trained for) and the code that runs it, under every form of parallelism.

`trainer/objectives/` has the objectives that the config selects. Transformer, pipeline and training step know only the classes here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Objective:
    """An objective that computes the loss of a micro batch from the losses of its tokens; by default it is their sum.

    An objective replaces the members that differ. One object serves all micro batches of a rank, on the rank's device.
    """

    loss_unit = "token"
    """What the logged loss is a mean over. It is the number of loss tokens, or of samples if a sample has several rows."""
    has_accuracy = False
    """True if `pop_correct_count` counts; the accuracy is the count per loss unit."""
    has_perplexity = False
    """True if e to the power of the mean loss is the model's perplexity."""
    is_sum_over_tokens = True
    """True if each token adds a term of its own to the loss. The loss is then computed in chunks, which saves memory, and also with context
    parallelism, where each rank has a part of every sequence. False if the loss needs full sequences."""
    copies_per_row = 1
    """How many times the forward pass runs each row, such as 2 for a tuned and a reference model: first all rows, then all again. Above 1,
    `is_sum_over_tokens` must be False."""

    def prepare_model(self, model: nn.Module) -> None:
        """Change the full, not yet parallelized `model` in place, if the objective needs it."""

    def compute_loss(self, token_losses: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, a scalar; it is differentiated.

        `token_losses`: cross-entropy of each token in nats, 0 without a target, flattened: of all rows, once for each copy. `targets`:
        IGNORE_INDEX for tokens without a loss; (rows, sequence), or flattened if the loss is a sum over tokens. The rows of a sample
        are consecutive.
        """
        return token_losses.sum()

    def pop_correct_count(self) -> Tensor | None:
        """Return how many loss units were correct since the last call, and reset the counter. None if nothing was counted."""
        return None

    def generating_text(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context manager in which `model` generates text, one row for each prompt, as the trained model."""
        return nullcontext()


@dataclass(frozen=True)
class VectorLoss:
    """The loss of this replica's part of a global batch, and the gradients of its vectors."""

    loss: Tensor
    """Loss in nats, summed over this replica's samples, in float64."""
    correct_count: Tensor
    """Number of this replica's samples that count as correct in the accuracy."""
    vector_gradients: Tensor
    """Gradient of the loss over all replicas' samples with respect to each of this replica's vectors; same shape as the vectors."""

    def select_micro_batch(self, index: int, size: int) -> Tensor:
        """Return the vector gradients of micro batch `index` of this replica, which has `size` vectors.

        Zeros if there is no such micro batch.
        """
        gradients = self.vector_gradients[index * size : (index + 1) * size]
        return gradients if len(gradients) else self.vector_gradients.new_zeros(size, 1)


class VectorObjective(Objective, ABC):
    """An objective that compares the vectors of all texts of a global batch, for models with an embedding head.

    The loss covers the whole global batch, however many replicas and micro batches there are, with the memory of one micro batch: vectors
    are first computed without gradients, the loss is differentiated with respect to the vectors, and then each micro batch runs again with
    its part of those gradients (GradCache: Gao et al. 2021, arXiv 2101.06983). So the loss is the same in every topology, at the cost of
    one more forward pass. Dropout is a function of the step and the sample, so it drops the same elements in both passes.
    """

    is_sum_over_tokens = False

    @abstractmethod
    def compute_sample_losses(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample of a global batch, differentiable, and whether the sample counts as correct in the accuracy.

        `vectors` (samples, rows per sample, dimensions): unit-length vectors; for each sample that of its text, and those of its companion
        texts.
        """

    def compute_vector_loss(
        self, vectors: Tensor, *, rows_per_sample: int, first_sample: int, global_batch_size: int, group: dist.ProcessGroup
    ) -> VectorLoss:
        """Compute the loss over the vectors of all replicas. Called by the ranks of `group` together, one rank per replica.

        `vectors` (this replica's samples x `rows_per_sample`, dimensions). This replica has the samples from `first_sample` on, of
        `global_batch_size` samples in total.
        """
        local_vectors = vectors.view(-1, rows_per_sample, vectors.shape[1])
        local_slice = slice(first_sample, first_sample + len(local_vectors))
        all_vectors = vectors.new_zeros((global_batch_size, *local_vectors.shape[1:]))
        all_vectors[local_slice] = local_vectors
        dist.all_reduce(all_vectors, group=group)
        with torch.enable_grad():
            losses, correct = self.compute_sample_losses(all_vectors.requires_grad_())
            (gradients,) = torch.autograd.grad(losses.sum(), all_vectors)
        return VectorLoss(losses.detach()[local_slice].double().sum(), correct[local_slice].sum(), gradients[local_slice].flatten(0, 1))
