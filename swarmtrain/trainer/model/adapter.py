"""Adapters (Houlsby et al. 2019, arXiv 1902.00751): the output of attention or of the feed-forward block passes through a bottleneck.

The bottleneck computes x + W GELU(N x + n) + w, before the output is added to the residual stream.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.peft import zero_second_half


class Adapter(nn.Module):
    """One bottleneck block. W is initialized with zeros, so the model initially computes what it did without adapters."""

    def __init__(self, hidden_size: int, bottleneck_size: int) -> None:
        super().__init__()
        self.down_projection = nn.Linear(hidden_size, bottleneck_size)
        self.up_projection = nn.Linear(bottleneck_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what is added to `hidden`."""
        output: Tensor = self.up_projection(functional.gelu(self.down_projection(hidden)))
        return output


class LayerAdapters(nn.ModuleDict):
    """The adapters of one layer."""

    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        self.first_half_only = False
        """Apply adapters to the first half of the samples only."""
        config = architecture.adapter_config
        factors = {"after_attention": config.attention_downsampling_factor, "after_mlp": config.mlp_downsampling_factor} if config else {}
        width = architecture.hidden_size
        super().__init__({name: Adapter(width, max(1, int(width * factor))) for name, factor in factors.items() if factor})

    def apply_adapter(self, name: str, hidden: Tensor) -> Tensor:
        """Return `hidden` after the adapter `name`; unchanged if there is no such adapter."""
        if name not in self:
            return hidden
        adapter_output: Tensor = self[name](hidden)
        return hidden + (zero_second_half(adapter_output) if self.first_half_only else adapter_output)
