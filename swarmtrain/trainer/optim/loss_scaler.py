"""Dynamic loss scaling for float16: makes small gradients representable, and skips steps whose gradients overflow.

The scale is lowered after an overflow and raised after a number of steps without one, as in Micikevicius et al. 2017 (arXiv 1710.03740),
with the hysteresis of DeepSpeed and Scaling.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.schema.optimizer import LossScalerConfig
from swarmtrain.config.schema.transformer_architecture import Precision


@dataclass(frozen=True)
class LossScaleState:
    """State of the loss scaling between two steps."""

    factor: float
    """Loss scale: factor by which the loss is multiplied."""
    clean_steps: float
    """Number of steps since the last overflow."""
    hysteresis: float
    """Number of overflows until the loss scale is lowered: at 1, the next overflow lowers it."""


def build_initial_loss_scale_state(config: LossScalerConfig) -> LossScaleState:
    """Return the loss scale state at the start of a run."""
    return LossScaleState(config.initial_scale, 0, config.hysteresis)


def update_loss_scale_state(state: LossScaleState, config: LossScalerConfig, *, overflow: bool) -> LossScaleState:
    """Return the loss scale state after a step. `overflow`: the step was skipped because its gradients overflowed."""
    if overflow:
        if state.hysteresis > 1:
            return LossScaleState(state.factor, 0, state.hysteresis - 1)
        return LossScaleState(max(state.factor / config.factor, config.min_scale), 0, state.hysteresis)
    clean_steps = state.clean_steps + 1
    grown = clean_steps % config.window == 0
    hysteresis = config.hysteresis if grown or config.consecutive_hysteresis else state.hysteresis
    return LossScaleState(state.factor * config.factor if grown else state.factor, clean_steps, hysteresis)


class LossScaler:
    """Dynamic loss scaling of a run. Its state is a tensor, so that checkpoints contain it."""

    def __init__(self, config: LossScalerConfig) -> None:
        self._config = config
        self.state = torch.zeros(len(fields(LossScaleState)), dtype=torch.float64)
        self.reset()

    @property
    def current_state(self) -> LossScaleState:
        """Loss scale state before the next step."""
        return LossScaleState(*self.state.tolist())

    @property
    def is_at_minimum(self) -> bool:
        """True if the loss scale is at its minimum, so that another overflow cannot lower it."""
        return self.current_state.factor <= self._config.min_scale

    def reset(self) -> None:
        """Set the loss scale state to that at the start of a run."""
        self._write_state(build_initial_loss_scale_state(self._config))

    def record_step(self, *, overflow: bool) -> None:
        """Update the loss scale state after a step. `overflow`: the step was skipped because its gradients overflowed."""
        self._write_state(update_loss_scale_state(self.current_state, self._config, overflow=overflow))

    def _write_state(self, state: LossScaleState) -> None:
        self.state.copy_(torch.tensor(astuple(state), dtype=torch.float64))


def build_loss_scaler(config: Config) -> LossScaler | None:
    """Return the loss scaler that `config` enables, or None. By default, loss scaling is enabled only for float16."""
    scaler_config = config.optimizer.loss_scaler
    default = config.transformer_architecture.precision is Precision.float16
    return LossScaler(scaler_config) if (default if scaler_config.enable is None else scaler_config.enable) else None


def unscale_gradients(gradients: list[Tensor], scaler: LossScaler) -> None:
    """Divide the gradients of a scaled loss by the loss scale, in place."""
    for gradient in gradients:
        gradient.mul_(1 / scaler.current_state.factor)
