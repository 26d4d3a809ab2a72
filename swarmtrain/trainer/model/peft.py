"""Parameters added to a model for fine-tuning (PEFT), recognized by their names: LoRA, adapters, and projections of an embedding head.

LoRA (Hu et al. 2021, arXiv 2106.09685) adds a low-rank update to a linear layer: W x + (alpha / rank) B A x. Adapters (Houlsby et al. 2019,
arXiv 1902.00751) are bottleneck layers after attention and after the feed-forward block. From the layer's output x, an adapter computes
x + W GELU(N x + n) + w, which is added to the residual stream instead of x.

LoRA and adapters initially do not change the model's output. If a model has added parameters, only they are trained, unless
trainer.finetunable_parameters selects others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.transformer_architecture import LoraConfig, TransformerArchitectureConfig
from swarmtrain.trainer.model.dropout import Dropout

LORA_KEY, ADAPTER_KEY = ".lora.", ".adapter."
_PROJECTION_HEAD_PREFIX = "head.projections."


def is_peft_parameter(name: str) -> bool:
    """Return whether the parameter `name` was added for fine-tuning and does not belong to the base model."""
    return LORA_KEY in name or ADAPTER_KEY in name or name.startswith(_PROJECTION_HEAD_PREFIX)


class Lora(nn.Module):
    """LoRA of one linear layer: computes the low-rank update (alpha / rank) B A x.

    B is initialized with zeros, so that LoRA initially does not change the model's output.
    """

    def __init__(self, in_features: int, out_features: int, config: LoraConfig, layer_name: str) -> None:
        """Create the matrices A and B for a linear layer. `layer_name` seeds the dropout."""
        super().__init__()
        self.dropout = Dropout(config.dropout, layer_name)
        self.a = nn.Linear(in_features, config.rank, bias=False)
        self.b = nn.Linear(config.rank, out_features, bias=False)
        self.scale = config.alpha / config.rank

    def forward(self, input: Tensor, noise: Tensor | None) -> Tensor:
        output: Tensor = self.b(self.a(self.dropout(input, noise)))
        return output * self.scale


class LoraAdapters(nn.ModuleDict):
    """The LoRA matrices of one module's linear layers, by layer name."""

    def __init__(self, architecture: TransformerArchitectureConfig, module_name: str, layers: Iterable[tuple[str, nn.Linear]]) -> None:
        """Create LoRA for those of `layers` that the config selects. `module_name` and the layer names seed the dropout."""
        config = architecture.lora_config
        self.is_enabled = True
        """If False, layers have their output without LoRA."""
        super().__init__(
            {
                name: Lora(layer.in_features, layer.out_features, config, f"{module_name} {name}")
                for name, layer in layers
                if config and name in config.layers
            }
        )

    @property
    def by_layer(self) -> dict[str, Lora]:
        """The LoRA matrices by layer name."""
        return {name: lora for name, lora in self.items() if isinstance(lora, Lora)}

    def forward_with_lora(self, layer_name: str, layer: nn.Module, input: Tensor, noise: Tensor | None) -> Tensor:
        """Return the output of `layer` plus its low-rank update, if the config selects `layer_name` for LoRA.

        `noise` (batch, sequence): see Dropout.
        """
        output: Tensor = layer(input)
        if not self.is_enabled or layer_name not in self:
            return output
        lora_output: Tensor = self[layer_name](input, noise)
        return output + lora_output


def merge_lora_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, config: LoraConfig) -> Tensor:
    """Return `weight` + (alpha / rank) B A: a layer's weight (outputs, inputs) with LoRA merged into it, in the dtype of `weight`."""
    dtype = torch.float64
    return (weight.to(dtype) + lora_b.to(dtype) @ lora_a.to(dtype) * (config.alpha / config.rank)).to(weight.dtype)


class _Adapter(nn.Module):
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
        super().__init__({name: _Adapter(width, max(1, int(width * factor))) for name, factor in factors.items() if factor})

    def apply_adapter(self, name: str, hidden: Tensor) -> Tensor:
        """Return `hidden` plus the output of the adapter `name`; `hidden` unchanged if there is no such adapter."""
        if not self.is_enabled or name not in self:
            return hidden
        adapter_output: Tensor = self[name](hidden)
        return hidden + adapter_output
