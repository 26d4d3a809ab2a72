"""Feed-forward blocks: two matrices with a GELU between them, or SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.transformer_architecture import MlpType, TransformerArchitectureConfig


def feed_forward(shape: TransformerArchitectureConfig) -> nn.Module:
    """Return the feed-forward block that `shape` says."""
    return SwiGlu(shape) if shape.mlp_type is MlpType.swiglu else Mlp(shape)


class Mlp(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden_size, shape.mlp_width, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.mlp_width, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(functional.gelu(self.up(hidden)))
        return projected


class SwiGlu(nn.Module):
    """A gated feed-forward network: three matrices."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.mlp_width, bias=shape.mlp_bias)
        self.up = nn.Linear(shape.hidden_size, shape.mlp_width, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.mlp_width, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return projected
