"""Initial parameter values, which do not depend on the topology.

Each parameter is drawn from a random generator seeded by (seed, parameter name), so its values depend neither on the order in which
modules are created nor on how the model is sharded. A rank that holds shards draws one full parameter at a time, and keeps only
its shard: no rank holds the full model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.peft import is_peft_parameter
from swarmtrain.trainer.random_seeds import derive_seed

_INIT_STD = 0.02


@dataclass(frozen=True)
class ParameterInitializer:
    """Computes the initial values of a model with `architecture`.

    Matrices are normally distributed with standard deviation 0.02 (1 with u-muP), norm weights are 1 and biases 0. Parameters added for
    fine-tuning are also normally distributed, except the second matrix of LoRA and of adapters, which is 0.
    """

    architecture: TransformerArchitectureConfig
    seed: int

    def __call__(self, name: str, size: torch.Size) -> Tensor:
        """Return the initial value of the full parameter `name` with shape `size`, in float32 on the CPU."""
        if len(size) < 2:
            return torch.full(size, 0.0 if name.endswith(".bias") else 1.0)
        if is_peft_parameter(name) and name.endswith((".b.weight", ".up_projection.weight")):
            return torch.zeros(size)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, name))
        if is_peft_parameter(name):
            return torch.empty(size).normal_(0, (3 * size[1]) ** -0.5, generator=generator)
        if self.architecture.umup.enable:
            return torch.empty(size).normal_(generator=generator)
        writes_to_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        # Each block adds to the residual stream twice. With this standard deviation the stream's variance does not grow with depth (GPT-2).
        std = _INIT_STD / (2 * self.architecture.num_layers) ** 0.5 if writes_to_residual else _INIT_STD
        return torch.empty(size).normal_(0, std, generator=generator)


def materialize_parameters(
    module: nn.Module, parameter_names: Mapping[nn.Parameter, str], get_initial_value: Callable[[str], Tensor], device: torch.device
) -> None:
    """Replace the meta parameters of `module` with parameters on `device` whose values are `get_initial_value(name)`.

    The buffers of `module` are moved to `device`.

    `parameter_names` maps each of these parameters to its name. A parameter that several modules share remains shared.
    """
    materialized: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None and parameter.device.type == "meta":
                if parameter not in materialized:
                    materialized[parameter] = nn.Parameter(
                        get_initial_value(parameter_names[parameter]).to(device), requires_grad=parameter.requires_grad
                    )
                setattr(owner, key, materialized[parameter])
        for key, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, key, buffer.to(device))
