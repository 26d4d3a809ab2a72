"""`optimizer`: how gradients become steps."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, wrong

_SLOWEST = 0.99
"""bfloat16 keeps 8 bits: a mean that takes less than 1 % of what is new would often round it away."""


class OptimizerMethod(StrEnum):
    """Rules by which gradients become steps."""

    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"


class StatePrecision(StrEnum):
    """Numbers in which the optimizer's state is kept between steps."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class LossScalerConfig(Section):
    """Multiplies the loss, so that small gradients do not vanish in float16."""

    enable: bool | None = Field(None, description="Scale the loss, and skip steps whose gradients overflow. null: with precision float16.")
    initial_scale: float = Field(2.0**16, gt=0, description="What the loss is multiplied by at first.")
    window: int = Field(1000, ge=1, description="Steps without an overflow after which the scale rises.")
    hysteresis: int = Field(2, ge=1, description="Overflows that it takes to lower it, and then each one does.")
    consecutive_hysteresis: bool = Field(
        False, description="Count the overflows that it takes anew after each step without one. false: after each rise."
    )
    min_scale: float = Field(1.0, gt=0, description="Lowest scale. An overflow at it ends the run.")
    factor: float = Field(2.0, gt=1, description="What it rises and falls by.")

    @model_validator(mode="after")
    def _minimum_is_lower(self) -> LossScalerConfig:
        if self.min_scale > self.initial_scale:
            raise wrong("min_scale", f"{self.min_scale:g} is above initial_scale {self.initial_scale:g}")
        return self


class OptimizerConfig(Section):
    """How gradients become steps."""

    method: OptimizerMethod = Field(
        OptimizerMethod.adamw, description="adamw, sgd, or muon: the blocks' matrices by Muon, everything else by AdamW."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay of the mean of their squares.")
    eps: float = Field(1e-8, gt=0, description="AdamW: added to the denominator.")
    momentum: float = Field(0.95, ge=0, lt=1, description="SGD and Muon: decay of the sum, or mean, of gradients.")
    state_precision: StatePrecision = Field(
        StatePrecision.float32, description="Optimizer state between steps: float32, or bfloat16, which halves its memory."
    )
    gradient_clipping: float = Field(1.0, ge=0, description="Largest norm of the whole gradient. 0: no clipping.")
    zero: bool = Field(False, description="Divide the optimizer's state over replicas (ZeRO-1). fsdp and hsdp do so anyway.")
    loss_scaler: LossScalerConfig = Field(LossScalerConfig(), description="Loss scaling, for float16.")

    @model_validator(mode="after")
    def _state_can_move(self) -> OptimizerConfig:
        if self.state_precision is StatePrecision.bfloat16:
            for name in ("beta1", "beta2", "momentum"):
                if getattr(self, name) > _SLOWEST:
                    reason = f"{getattr(self, name):g} is too slow a mean for the 8 bits of state_precision: bfloat16"
                    raise wrong(name, reason, f"at most {_SLOWEST}, or state_precision: float32")
        return self
