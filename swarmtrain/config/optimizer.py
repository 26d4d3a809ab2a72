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

    @model_validator(mode="after")
    def _state_can_move(self) -> OptimizerConfig:
        if self.state_precision is StatePrecision.bfloat16:
            for name in ("beta1", "beta2", "momentum"):
                if getattr(self, name) > _SLOWEST:
                    reason = f"{getattr(self, name):g} is too slow a mean for the 8 bits of state_precision: bfloat16"
                    raise wrong(name, reason, f"at most {_SLOWEST}, or state_precision: float32")
        return self
