"""What stands beside a model to tune it, or comes after it: by its parameters' names, which have one of these in them.

What stands beside it begins as if it were not there. With that, it alone is trained, unless trainer.finetunable_parameters says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

LORA, ADAPTER = ".lora.", ".adapter."
_PROJECTION = "head.projections."


def first_half(made: Tensor) -> Tensor:
    """Return `made` (samples, …) with zeros in place of the second half of the samples."""
    half = len(made) // 2
    return torch.cat((made[:half], torch.zeros_like(made[half:])))


def is_beside(name: str) -> bool:
    """Return whether the parameter `name` is none of the model's own."""
    return LORA in name or ADAPTER in name or name.startswith(_PROJECTION)
