"""Adapters (Houlsby et al. 2019, arXiv 1902.00751): bottleneck layers after attention and after the feed-forward block.

From the layer's output x, an adapter computes x + W GELU(N x + n) + w, which is added to the residual stream instead of x.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig


class Adapter(nn.Module):
    """One bottleneck layer. W is initialized with zeros, so that the adapter initially does not change the model's output."""

    def __init__(self, hidden_size: int, bottleneck_size: int) -> None:
        super().__init__()
        self.down_projection = nn.Linear(hidden_size, bottleneck_size)
        self.up_projection = nn.Linear(bottleneck_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the adapter's output, to be added to `hidden`; same shape as `hidden`."""
        output: Tensor = self.up_projection(functional.gelu(self.down_projection(hidden)))
        return output


class LayerAdapters(nn.ModuleDict):
    """The adapters of one transformer layer, by name: "after_attention" and "after_mlp"."""

    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        self.is_enabled = True
        """If False, layers have their output without adapters."""
        config = architecture.adapter_config
        factors = {"after_attention": config.attention_downsampling_factor, "after_mlp": config.mlp_downsampling_factor} if config else {}
        width = architecture.hidden_size
        super().__init__({name: Adapter(width, max(1, int(width * factor))) for name, factor in factors.items() if factor})

    def apply_adapter(self, name: str, hidden: Tensor) -> Tensor:
        """Return `hidden` plus the output of the adapter `name`; `hidden` unchanged if there is no such adapter."""
        if not self.is_enabled or name not in self:
            return hidden
        adapter_output: Tensor = self[name](hidden)
        return hidden + adapter_output
