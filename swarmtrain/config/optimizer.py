"""`optimizer`: how gradients become steps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from swarmtrain.config.base import Section


class OptimizerConfig(Section):
    """How gradients become steps."""

    method: Literal["adamw"] = Field("adamw", description="AdamW, with its state in fp32.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the mean of their squares.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    gradient_clipping: float = Field(1.0, ge=0, description="Largest norm of the whole gradient. 0: no clipping.")
    zero: bool = Field(False, description="Divide the optimizer's state over replicas (ZeRO-1). fsdp and hsdp do so anyway.")
