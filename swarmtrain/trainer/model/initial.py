"""What parameters begin with: each is drawn from a generator seeded by (seed, its name), so that its values depend neither
on the order in which modules are made nor on how the model is divided afterwards.
"""

from __future__ import annotations

import torch
from torch import nn

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.runtime import derived_seed

_DEVIATION = 0.02


@torch.no_grad()
def fill(model: nn.Module, shape: TransformerArchitectureConfig, seed: int) -> None:
    """Fill the parameters of `model`: matrices with noise, of deviation one with u-muP, norms with one, biases with zero."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0 if name.endswith(".bias") else 1)
            continue
        generator = torch.Generator().manual_seed(derived_seed(seed, name))
        if shape.umup.enable:
            parameter.normal_(generator=generator)
            continue
        into_stream = name.endswith(("attention.output.weight", "mlp.down.weight"))
        # Each block adds twice to the residual stream; scaled so, its variance does not grow with depth (GPT-2).
        parameter.normal_(0, _DEVIATION / (2 * shape.num_layers) ** 0.5 if into_stream else _DEVIATION, generator=generator)
