"""LoRA (Hu et al. 2021, arXiv 2106.09685): adds a low-rank product to a layer's matrix W, W x + alpha / rank B A x."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swarmtrain.config.schema.transformer_architecture import LoraConfig, TransformerArchitectureConfig
from swarmtrain.trainer.model.dropout import Dropout
from swarmtrain.trainer.model.peft import zero_second_half


class Lora(nn.Module):
    """The low-rank product of one layer. B is initialized with zeros, so the model initially computes what it did without LoRA."""

    def __init__(self, inputs: int, outputs: int, config: LoraConfig, layer_name: str) -> None:
        """`layer_name` identifies the layer for Dropout."""
        super().__init__()
        self.dropout = Dropout(config.dropout, layer_name)
        self.a = nn.Linear(inputs, config.rank, bias=False)
        self.b = nn.Linear(config.rank, outputs, bias=False)
        self.scale = config.alpha / config.rank

    def forward(self, input: Tensor, noise: Tensor | None) -> Tensor:
        # Parallel layers may receive their input as a replicated DTensor; each rank holds all of it.
        local_input = input.to_local() if isinstance(input, DTensor) else input
        output: Tensor = self.b(self.a(self.dropout(local_input, noise)))
        return output * self.scale


class LoraAdapters(nn.ModuleDict):
    """The low-rank products of one module's layers, by the layers' names."""

    def __init__(self, architecture: TransformerArchitectureConfig, module_name: str, layers: Iterable[tuple[str, nn.Linear]]) -> None:
        """`module_name` identifies the module for Dropout."""
        config = architecture.lora_config
        lora_layers = {name: layer for name, layer in layers if config and name in config.layers}
        self.first_half_only = False
        """Apply LoRA to the first half of the samples only."""
        super().__init__(
            {
                name: Lora(layer.in_features, layer.out_features, config, f"{module_name} {name}")
                for name, layer in lora_layers.items()
                if config
            }
        )

    def forward_with_lora(self, name: str, layer: nn.Module, input: Tensor, noise: Tensor | None) -> Tensor:
        """Return the output of `layer`, called `name`, plus its LoRA output. For `noise` see Dropout."""
        output: Tensor = layer(input)
        if name not in self:
            return output
        lora_output: Tensor = self[name](input, noise)
        return output + (zero_second_half(lora_output) if self.first_half_only else lora_output)


def merge_lora_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, config: LoraConfig) -> Tensor:
    """Return a layer's `weight` (outputs, inputs) with LoRA merged into it, in the dtype of `weight`."""
    dtype = torch.float64
    return (weight.to(dtype) + lora_b.to(dtype) @ lora_a.to(dtype) * (config.alpha / config.rank)).to(weight.dtype)
