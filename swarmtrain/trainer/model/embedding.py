"""A head that makes one vector of each text, by whose cosines texts are compared."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from swarmtrain.config.transformer_architecture import EmbeddingHeadConfig, Pooling, TransformerArchitectureConfig
from swarmtrain.trainer.model.targets import IGNORE


class EmbeddingHead(nn.Module):
    """Pools what a text's tokens have become. Means that weigh tokens by their places are those of SGPT (Muennighoff 2022,
    arXiv 2202.08904): under causal attention the first tokens have seen little of the text.
    """

    def __init__(self, shape: TransformerArchitectureConfig, config: EmbeddingHeadConfig) -> None:
        super().__init__()
        self._pooling = config.pooling
        widths = shape.hidden_size, *config.proj_layers
        self.projections = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))

    def forward(self, hidden: Tensor, *, targets: Tensor) -> Tensor:
        """Return vectors (texts, dimensions) of length one, in float32 at least.

        `hidden` (texts, sequence, hidden size); `targets` (texts, sequence): where they are IGNORE, a token does not count.
        """
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            vectors = (self._weights(targets, hidden.dtype)[:, None] @ hidden).squeeze(1)
            for number, projection in enumerate(self.projections):
                vectors = projection(functional.gelu(vectors) if number else vectors)
            return functional.normalize(vectors, dim=-1)

    def _weights(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what each token counts. All of a text's make one, or nothing if none of them counts."""
        counts = targets != IGNORE
        places = torch.arange(1, targets.shape[1] + 1, device=targets.device)
        if self._pooling is Pooling.last_token:
            return (counts & (places == (places * counts).amax(1, keepdim=True))).to(dtype)
        weights = (counts * (places if self._pooling is Pooling.weighted_mean else 1)).to(dtype)
        return weights / weights.sum(1, keepdim=True).clamp_min(1)
