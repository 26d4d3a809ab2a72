"""Feed-forward blocks: GELU with two matrices, or SwiGLU with three (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.transformer_architecture import ActivationFunction, MlpType, TransformerArchitectureConfig
from swarmtrain.trainer.model import umup
from swarmtrain.trainer.model.layers import build_linear
from swarmtrain.trainer.model.peft import LoraAdapters


def build_mlp(architecture: TransformerArchitectureConfig, layer: int) -> nn.Module:
    """Return the feed-forward block that `architecture` selects, for the layer with index `layer`."""
    return SwiGlu(architecture, layer) if architecture.mlp_type is MlpType.swiglu else Mlp(architecture, layer)


class Mlp(nn.Module):
    """Feed-forward block with two matrices and a GELU between them.

    GELU may be approximated by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415).
    """

    def __init__(self, architecture: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.approximate = "tanh" if architecture.activation_function is ActivationFunction.gelu_tanh else "none"
        self.act_mult = architecture.umup.act_mult if architecture.umup.enable else None
        self.up = build_linear(
            architecture, architecture.hidden_size, architecture.mlp_width, bias=architecture.mlp_bias, fp8=architecture.fp8_config_mlp
        )
        self.down = build_linear(
            architecture,
            architecture.mlp_width,
            architecture.hidden_size,
            bias=architecture.mlp_bias,
            fp8=architecture.fp8_config_mlp_dense_out,
        )
        self.lora = LoraAdapters(architecture, f"{layer} mlp", {"up": self.up, "down": self.down}.items())

    def forward(self, hidden: Tensor, *, noise: Tensor | None = None) -> Tensor:
        """Return the block's output, with the shape of `hidden`.

        `noise` (batch, sequence): the dropout noise of the tokens in `hidden`, see Dropout.
        """
        up = self.lora.forward_with_lora("up", self.up, hidden, noise)
        activated = (
            functional.gelu(up, approximate=self.approximate) if self.act_mult is None else self._apply_unit_scaled_gelu(up, self.act_mult)
        )
        return self.lora.forward_with_lora("down", self.down, activated, noise)

    def _apply_unit_scaled_gelu(self, up: Tensor, multiplier: float) -> Tensor:
        scale = umup.compute_gelu_scale(multiplier)
        activated = functional.gelu(multiplier * umup.scale_values_and_gradients(up, 1.0, scale), approximate=self.approximate)
        return umup.scale_values_and_gradients(activated / multiplier, scale)


class SwiGlu(nn.Module):
    """SwiGLU feed-forward block: three matrices, gated by SiLU."""

    def __init__(self, architecture: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.act_mult = architecture.umup.act_mult if architecture.umup.enable else None
        self.gate = build_linear(
            architecture, architecture.hidden_size, architecture.mlp_width, bias=architecture.mlp_bias, fp8=architecture.fp8_config_mlp
        )
        self.up = build_linear(
            architecture, architecture.hidden_size, architecture.mlp_width, bias=architecture.mlp_bias, fp8=architecture.fp8_config_mlp
        )
        self.down = build_linear(
            architecture,
            architecture.mlp_width,
            architecture.hidden_size,
            bias=architecture.mlp_bias,
            fp8=architecture.fp8_config_mlp_dense_out,
        )
        self.lora = LoraAdapters(architecture, f"{layer} mlp", {"gate": self.gate, "up": self.up, "down": self.down}.items())

    def forward(self, hidden: Tensor, *, noise: Tensor | None = None) -> Tensor:
        """Return the block's output, with the shape of `hidden`.

        `noise` (batch, sequence): the dropout noise of the tokens in `hidden`, see Dropout.
        """
        gate, up = self.lora.forward_with_lora("gate", self.gate, hidden, noise), self.lora.forward_with_lora("up", self.up, hidden, noise)
        activated = functional.silu(gate) * up if self.act_mult is None else _apply_unit_scaled_swiglu(gate, up, self.act_mult)
        return self.lora.forward_with_lora("down", self.down, activated, noise)


def _apply_unit_scaled_swiglu(gate: Tensor, up: Tensor, multiplier: float) -> Tensor:
    scale = umup.compute_swiglu_scale(multiplier)
    gate, up = (umup.scale_values_and_gradients(values, 1.0, scale) for values in (gate, up))
    return umup.scale_values_and_gradients(functional.silu(multiplier * gate) * up / multiplier, scale)
