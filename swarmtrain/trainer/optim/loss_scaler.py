"""Loss scaling for float16: scales small gradients into its range, and skips steps whose gradients overflow.

The scale falls at an overflow and rises after a while without one, as in Micikevicius et al. 2017 (arXiv 1710.03740), with the hysteresis
of DeepSpeed and Scaling.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.schema.optimizer import LossScalerConfig
from swarmtrain.config.schema.transformer_architecture import Precision


@dataclass(frozen=True)
class LossScaleState:
    """The state of loss scaling between two steps."""

    factor: float
    """Factor of the loss."""
    clean_steps: float
    """Steps without an overflow since the last overflow."""
    hysteresis: float
    """Overflows until the factor falls, the last one included."""


def build_initial_state(config: LossScalerConfig) -> LossScaleState:
    """Return the state at the start of a run."""
    return LossScaleState(config.initial_scale, 0, config.hysteresis)


def advance_state(state: LossScaleState, config: LossScalerConfig, *, overflow: bool) -> LossScaleState:
    """Return the state after a step."""
    if overflow:
        if state.hysteresis > 1:
            return LossScaleState(state.factor, 0, state.hysteresis - 1)
        return LossScaleState(max(state.factor / config.factor, config.min_scale), 0, state.hysteresis)
    clean_steps = state.clean_steps + 1
    grown = clean_steps % config.window == 0
    hysteresis = config.hysteresis if grown or config.consecutive_hysteresis else state.hysteresis
    return LossScaleState(state.factor * config.factor if grown else state.factor, clean_steps, hysteresis)


class LossScaler:
    """The loss scaling of a run. Its state is a tensor, so that checkpoints contain it."""

    def __init__(self, config: LossScalerConfig) -> None:
        self._config = config
        self.state = torch.tensor(astuple(build_initial_state(config)), dtype=torch.float64)

    @property
    def current(self) -> LossScaleState:
        """The current state."""
        return LossScaleState(*self.state.tolist())

    @property
    def is_at_minimum(self) -> bool:
        """True if another overflow cannot lower the scale."""
        return self.current.factor <= self._config.min_scale

    def record_step(self, *, overflow: bool) -> None:
        """Update the state after a step that was made, or skipped because of an overflow."""
        self.state.copy_(torch.tensor(astuple(advance_state(self.current, self._config, overflow=overflow)), dtype=torch.float64))


def build_loss_scaler(config: Config) -> LossScaler | None:
    """Return the loss scaler that `config` asks for, or None."""
    scaler_config = config.optimizer.loss_scaler
    default = config.transformer_architecture.precision is Precision.float16
    return LossScaler(scaler_config) if (default if scaler_config.enable is None else scaler_config.enable) else None


def unscale_gradients(gradients: list[Tensor], scaler: LossScaler) -> None:
    """Divide gradients of a scaled loss by the scale, in place."""
    for gradient in gradients:
        gradient.mul_(1 / scaler.current.factor)
