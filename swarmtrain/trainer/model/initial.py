"""What parameters begin with: each is drawn from a generator seeded by (seed, its name), so that its values depend neither
on the order in which modules are made nor on how the model is divided. Whoever keeps a part draws the whole, one parameter
at a time, and takes that: no rank ever has a model that is too large for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.beside import is_beside
from swarmtrain.trainer.runtime import derived_seed

_DEVIATION = 0.02


@dataclass(frozen=True)
class Initial:
    """What the parameters of a model of this shape begin with: matrices with noise, of deviation one with u-muP,
    norms with one, biases with zero; of what stands beside the first matrix with noise, the second with zero."""

    shape: TransformerArchitectureConfig
    seed: int

    def __call__(self, name: str, size: torch.Size) -> Tensor:
        """Return the whole of parameter `name`, which has this size: float32, on the CPU."""
        if len(size) < 2:
            return torch.full(size, 0.0 if name.endswith(".bias") else 1.0)
        if is_beside(name) and name.endswith((".b.weight", ".wide.weight")):
            return torch.zeros(size)
        generator = torch.Generator().manual_seed(derived_seed(self.seed, name))
        if is_beside(name):
            return torch.empty(size).normal_(0, (3 * size[1]) ** -0.5, generator=generator)
        if self.shape.umup.enable:
            return torch.empty(size).normal_(generator=generator)
        into_stream = name.endswith(("attention.output.weight", "mlp.down.weight"))
        # Each block adds twice to the residual stream; scaled so, its variance does not grow with depth (GPT-2).
        deviation = _DEVIATION / (2 * self.shape.num_layers) ** 0.5 if into_stream else _DEVIATION
        return torch.empty(size).normal_(0, deviation, generator=generator)


def fill(module: nn.Module, names: Mapping[nn.Parameter, str], value: Callable[[str], Tensor], device: torch.device) -> None:
    """Give the parameters of `module` that have no values yet theirs, `value(name)`, and move it to `device`.

    `names` has at least theirs. Modules that share a parameter go on sharing it.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None and parameter.device.type == "meta":
                if parameter not in made:
                    made[parameter] = nn.Parameter(value(names[parameter]).to(device), requires_grad=parameter.requires_grad)
                setattr(owner, key, made[parameter])
        for key, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, key, buffer.to(device))
