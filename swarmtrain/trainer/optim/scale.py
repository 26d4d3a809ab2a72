"""Loss scaling, for float16: small gradients are multiplied into its range, and a step whose gradients overflow is skipped.

The scale falls at an overflow and rises after a while without one, as Micikevicius et al. 2017 (arXiv 1710.03740) do it,
with the hysteresis of DeepSpeed and Scaling.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.optimizer import LossScalerConfig
from swarmtrain.config.transformer_architecture import Precision


@dataclass(frozen=True)
class Scale:
    """Where the scaling of losses stands between two steps."""

    factor: float
    """What the loss is multiplied by."""
    clean: float
    """Steps without an overflow since the last one."""
    hysteresis: float
    """Overflows until the factor falls, the last one included."""


def first(config: LossScalerConfig) -> Scale:
    """Return where a run begins."""
    return Scale(config.initial_scale, 0, config.hysteresis)


def after(scale: Scale, config: LossScalerConfig, *, overflow: bool) -> Scale:
    """Return where the scaling stands after a step."""
    if overflow:
        if scale.hysteresis > 1:
            return Scale(scale.factor, 0, scale.hysteresis - 1)
        return Scale(max(scale.factor / config.factor, config.min_scale), 0, scale.hysteresis)
    clean = scale.clean + 1
    grown = clean % config.window == 0
    hysteresis = config.hysteresis if grown or config.consecutive_hysteresis else scale.hysteresis
    return Scale(scale.factor * config.factor if grown else scale.factor, clean, hysteresis)


class LossScale:
    """The scale of a run, in a tensor, so that checkpoints carry it."""

    def __init__(self, config: LossScalerConfig) -> None:
        self._config = config
        self.state = torch.tensor(astuple(first(config)), dtype=torch.float64)

    @property
    def now(self) -> Scale:
        """Where it stands."""
        return Scale(*self.state.tolist())

    @property
    def lowest(self) -> bool:
        """True if another overflow cannot lower it."""
        return self.now.factor <= self._config.min_scale

    def note(self, *, overflow: bool) -> None:
        """A step has been made, or skipped because of an overflow."""
        self.state.copy_(torch.tensor(astuple(after(self.now, self._config, overflow=overflow)), dtype=torch.float64))


def wanted(config: Config) -> LossScale | None:
    """Return the scale that `config` asks for, if it does."""
    options = config.optimizer.loss_scaler
    usual = config.transformer_architecture.precision is Precision.float16
    return LossScale(options) if (usual if options.enable is None else options.enable) else None


def unscale(gradients: list[Tensor], scale: LossScale) -> None:
    """Make of the gradients of a scaled loss those of the loss, in place."""
    for gradient in gradients:
        gradient.mul_(1 / scale.now.factor)
