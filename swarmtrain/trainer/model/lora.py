"""LoRA (Hu et al. 2021, arXiv 2106.09685): beside a layer's matrix W a product of two narrow ones, W x + alpha / rank B A x."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swarmtrain.config.transformer_architecture import LoraConfig, TransformerArchitectureConfig
from swarmtrain.trainer.model.beside import first_half
from swarmtrain.trainer.model.dropout import Dropout


class Lora(nn.Module):
    """The product beside one layer. B begins with zeros, so the model begins as it was."""

    def __init__(self, inputs: int, outputs: int, config: LoraConfig, place: str) -> None:
        """`place` is that of the layer, as Dropout has it."""
        super().__init__()
        self.dropout = Dropout(config.dropout, place)
        self.a = nn.Linear(inputs, config.rank, bias=False)
        self.b = nn.Linear(config.rank, outputs, bias=False)
        self.scale = config.alpha / config.rank

    def forward(self, input: Tensor, noise: Tensor | None) -> Tensor:
        # What parallel layers are given may be shown them as the whole; each rank has all of it.
        here = input.to_local() if isinstance(input, DTensor) else input
        made: Tensor = self.b(self.a(self.dropout(here, noise)))
        return made * self.scale


class Beside(nn.ModuleDict):
    """The products beside the layers of one module, by their names."""

    def __init__(self, shape: TransformerArchitectureConfig, place: str, layers: Iterable[tuple[str, nn.Linear]]) -> None:
        """`place` is that of the module."""
        config = shape.lora_config
        wanted = {name: layer for name, layer in layers if config and name in config.layers}
        self.halved = False
        """It counts for the first half of the samples alone."""
        super().__init__(
            {name: Lora(layer.in_features, layer.out_features, config, f"{place} {name}") for name, layer in wanted.items() if config}
        )

    def of(self, name: str, layer: nn.Module, input: Tensor, noise: Tensor | None) -> Tensor:
        """Return what `layer`, called `name`, makes of `input`, with what stands beside it. For `noise` see Dropout."""
        made: Tensor = layer(input)
        if name not in self:
            return made
        beside: Tensor = self[name](input, noise)
        return made + (first_half(beside) if self.halved else beside)


def merged(weight: Tensor, a: Tensor, b: Tensor, config: LoraConfig) -> Tensor:
    """Return a layer's `weight` (outputs, inputs) with what stands beside it, in its numbers."""
    wide = torch.float64
    return (weight.to(wide) + b.to(wide) @ a.to(wide) * (config.alpha / config.rank)).to(weight.dtype)
