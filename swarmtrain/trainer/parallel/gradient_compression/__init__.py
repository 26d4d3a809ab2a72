"""Compression of the gradients that replicas exchange: sums over replicas that are not exact, for slow networks.

bfloat16    each replica's sums are rounded to bfloat16
powersgd    each replica sends low-rank factors of its sums

Exact sums are those of ddp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.schema.fields.gradient_compression import GradientCompression
from swarmtrain.trainer.parallel.gradient_compression.bfloat16 import Bfloat16Compression
from swarmtrain.trainer.parallel.gradient_compression.powersgd import PowerSgdCompression


class GradientCompressor(Protocol):
    """Interface of a compression. All replicas call its methods in the same order, with gradients of the same weights."""

    is_active: bool
    """Whether gradients are compressed in the current step. If not, sums are exact."""

    def start_step(self, number: int) -> None:
        """Set `is_active` for step `number`."""
        ...

    def start_sum(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Begin to replace `gradients`, by weight, with their sums over replicas. Called several times, before `finish_sums`."""
        ...

    def finish_sums(self) -> None:
        """Wait until all gradients are replaced."""
        ...

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return the state between steps, by name. This rank has its own values. A checkpoint is loaded into the tensors in place."""
        ...

    def reset_state(self) -> None:
        """Set the state to that before the first step."""
        ...


def build_gradient_compressor(config: Config, weights: Mapping[str, Tensor], group: dist.ProcessGroup) -> GradientCompressor | None:
    """Return the compression that `config` selects for the gradients of `weights`, by name, over `group`; None for exact sums."""
    match config.topology.gradient_compression:
        case GradientCompression.none:
            return None
        case GradientCompression.bf16:
            return Bfloat16Compression(group)
        case GradientCompression.powersgd:
            return PowerSgdCompression(weights, group, config.topology.powersgd, seed=config.trainer.seed)
