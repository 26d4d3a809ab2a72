"""Adapters (Houlsby et al. 2019, arXiv 1902.00751): what attention, or the feed-forward block, adds to the stream goes through a narrow
block of its own, x + W GELU(N x + n) + w."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.beside import first_half


class Adapter(nn.Module):
    """One narrow block. W begins with zeros, so the model begins as it was."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, narrow)
        self.wide = nn.Linear(narrow, width)

    def forward(self, made: Tensor) -> Tensor:
        """Return what is added to `made`."""
        change: Tensor = self.wide(functional.gelu(self.narrow(made)))
        return change


class Adapters(nn.ModuleDict):
    """Those of one layer."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        self.halved = False
        """They count for the first half of the samples alone."""
        config = shape.adapter_config
        factors = {"after_attention": config.attention_downsampling_factor, "after_mlp": config.mlp_downsampling_factor} if config else {}
        width = shape.hidden_size
        super().__init__({name: Adapter(width, max(1, int(width * factor))) for name, factor in factors.items() if factor})

    def of(self, name: str, made: Tensor) -> Tensor:
        """Return what becomes of `made` where the adapter `name` stands, if it does."""
        if name not in self:
            return made
        change: Tensor = self[name](made)
        return made + (first_half(change) if self.halved else change)
