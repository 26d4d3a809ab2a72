"""Feed-forward blocks: two matrices with a GELU between them, or SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.transformer_architecture import Activation, MlpType, TransformerArchitectureConfig
from swarmtrain.trainer.model import umup
from swarmtrain.trainer.model.linear import linear
from swarmtrain.trainer.model.lora import Beside


def feed_forward(shape: TransformerArchitectureConfig, layer: int) -> nn.Module:
    """Return the feed-forward block that `shape` says, of layer number `layer`."""
    return SwiGlu(shape, layer) if shape.mlp_type is MlpType.swiglu else Mlp(shape, layer)


class Mlp(nn.Module):
    """Two matrices with a GELU between them, or its approximation by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    def __init__(self, shape: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.approximate = "tanh" if shape.activation_function is Activation.gelu_tanh else "none"
        self.act_mult = shape.umup.act_mult if shape.umup.enable else None
        self.up = linear(shape, shape.hidden_size, shape.mlp_width, bias=shape.mlp_bias, fp8=shape.fp8_config_mlp)
        self.down = linear(shape, shape.mlp_width, shape.hidden_size, bias=shape.mlp_bias, fp8=shape.fp8_config_mlp_dense_out)
        self.lora = Beside(shape, f"{layer} mlp", {"up": self.up, "down": self.down}.items())

    def forward(self, hidden: Tensor, *, noise: Tensor | None = None) -> Tensor:
        """For `noise`, that of all tokens of `hidden`, see Dropout."""
        up = self.lora.of("up", self.up, hidden, noise)
        between = functional.gelu(up, approximate=self.approximate) if self.act_mult is None else self._unit(up, self.act_mult)
        return self.lora.of("down", self.down, between, noise)

    def _unit(self, up: Tensor, multiplier: float) -> Tensor:
        scale = umup.gelu_scale(multiplier)
        between = functional.gelu(multiplier * umup.scaled(up, 1.0, scale), approximate=self.approximate)
        return umup.scaled(between / multiplier, scale)


class SwiGlu(nn.Module):
    """A gated feed-forward network: three matrices."""

    def __init__(self, shape: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.act_mult = shape.umup.act_mult if shape.umup.enable else None
        self.gate = linear(shape, shape.hidden_size, shape.mlp_width, bias=shape.mlp_bias, fp8=shape.fp8_config_mlp)
        self.up = linear(shape, shape.hidden_size, shape.mlp_width, bias=shape.mlp_bias, fp8=shape.fp8_config_mlp)
        self.down = linear(shape, shape.mlp_width, shape.hidden_size, bias=shape.mlp_bias, fp8=shape.fp8_config_mlp_dense_out)
        self.lora = Beside(shape, f"{layer} mlp", {"gate": self.gate, "up": self.up, "down": self.down}.items())

    def forward(self, hidden: Tensor, *, noise: Tensor | None = None) -> Tensor:
        """For `noise`, that of all tokens of `hidden`, see Dropout."""
        gate, up = self.lora.of("gate", self.gate, hidden, noise), self.lora.of("up", self.up, hidden, noise)
        between = functional.silu(gate) * up if self.act_mult is None else _unit_swiglu(gate, up, self.act_mult)
        return self.lora.of("down", self.down, between, noise)


def _unit_swiglu(gate: Tensor, up: Tensor, multiplier: float) -> Tensor:
    scale = umup.swiglu_scale(multiplier)
    gate, up = (umup.scaled(part, 1.0, scale) for part in (gate, up))
    return umup.scaled(functional.silu(multiplier * gate) * up / multiplier, scale)
