"""Initial parameter values, which do not depend on the topology.

Each parameter is a function of (seed, parameter name), and each of its elements also of its place in the parameter, so its values depend
neither on the order in which modules are created nor on how the model is sharded, and a rank draws only its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.counter_normals import draw_normals
from swarmtrain.trainer.model.peft import is_peft_parameter
from swarmtrain.trainer.random_seeds import derive_seed

_INIT_STD = 0.02

Region = tuple[slice, ...]
"""A part of a full parameter: one slice per dimension, each with a start and a stop."""


class ParameterSource(Protocol):
    """Where the values of a model's parameters come from, before a checkpoint or training changes them."""

    def write_region(self, name: str, size: torch.Size, region: Region, target: Tensor) -> None:
        """Write the values of `region` of the parameter `name`, whose full shape is `size`, to `target`, which has the region's shape."""
        ...


@dataclass(frozen=True)
class ParameterInitializer:
    """Computes the initial values of a model with `architecture`.

    Matrices are normally distributed with standard deviation 0.02 (1 with u-muP), norm weights are 1 and biases 0. Parameters added for
    fine-tuning are also normally distributed, except the second matrix of LoRA and of adapters, which is 0.
    """

    architecture: TransformerArchitectureConfig
    seed: int

    def write_region(self, name: str, size: torch.Size, region: Region, target: Tensor) -> None:
        """Write the initial values of `region` of the parameter `name`, whose full shape is `size`, to `target`."""
        if len(size) < 2:
            target.fill_(0.0 if name.endswith(".bias") else 1.0)
        elif is_peft_parameter(name) and name.endswith((".b.weight", ".up_projection.weight")):
            target.zero_()
        else:
            draw_normals(
                target.flatten(1),
                self._choose_standard_deviation(name, size),
                seed=derive_seed(self.seed, name),
                columns=size[1:].numel(),
                first_row=region[0].start,
                first_column=region[1].start * size[2:].numel(),  # only matrices are divided in other dimensions than the first
            )

    def _choose_standard_deviation(self, name: str, size: torch.Size) -> float:
        if is_peft_parameter(name):
            return float((3 * size[1]) ** -0.5)
        if self.architecture.umup.enable:
            return 1.0
        writes_to_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        # Each block adds to the residual stream twice. With this standard deviation the stream's variance does not grow with depth (GPT-2).
        return _INIT_STD / float(2 * self.architecture.num_layers) ** 0.5 if writes_to_residual else _INIT_STD


@dataclass(frozen=True)
class LoadedParameters:
    """Parameters that are loaded from files."""

    load_parameter: Callable[[str, torch.Size], Tensor]
    """Function that returns a full parameter, given its name and shape."""

    def write_region(self, name: str, size: torch.Size, region: Region, target: Tensor) -> None:
        """Write `region` of the parameter `name`, whose full shape is `size`, to `target`. Raises the errors of `load_parameter`."""
        target.copy_(self.load_parameter(name, size)[region])


def select_all(size: torch.Size) -> Region:
    """Return the region that is a whole parameter of shape `size`."""
    return tuple(slice(0, length) for length in size)


def materialize_parameters(
    module: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32, frozen_dtype: torch.dtype | None = None
) -> None:
    """Replace the meta parameters of `module` with uninitialized parameters on `device`, and move the buffers of `module` there.

    `frozen_dtype`: type of the parameters that need no gradient; None: `dtype`. A parameter that several modules share remains shared.
    """
    materialized: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None and parameter.device.type == "meta":
                if parameter not in materialized:
                    own_dtype = dtype if parameter.requires_grad or frozen_dtype is None else frozen_dtype
                    materialized[parameter] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=own_dtype, device=device), requires_grad=parameter.requires_grad
                    )
                setattr(owner, key, materialized[parameter])
        for key, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, key, buffer.to(device))


@torch.no_grad()
def write_parameters(source: ParameterSource, parameters: Mapping[str, nn.Parameter]) -> None:
    """Write the values from `source` to the full `parameters`, by name."""
    for name, parameter in parameters.items():
        source.write_region(name, parameter.shape, select_all(parameter.shape), parameter)
