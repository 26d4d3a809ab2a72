"""`optimizer`: optimizer, gradient clipping and loss scaling. `diloco`: the outer optimizer of a run with learners."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.schema.section import Section, build_field_error, check_is_multiple

_MAX_BFLOAT16_DECAY = 0.99
"""Maximum decay of moving averages in bfloat16, which has 8 significant bits: rounding often discards updates below 1 %."""


class OptimizerMethod(StrEnum):
    """Optimizer algorithms."""

    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"


class StatePrecision(StrEnum):
    """Data types of the optimizer state between steps."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class LossScalerConfig(Section):
    """Dynamic loss scaling, which keeps small float16 gradients from underflowing."""

    enable: bool | None = Field(
        None, description="Scale the loss, and skip steps whose gradients overflow. null: only with precision float16."
    )
    initial_scale: float = Field(2.0**16, gt=0, description="Initial loss scale.")
    window: int = Field(1000, ge=1, description="Consecutive steps without overflow after which the scale rises.")
    hysteresis: int = Field(2, ge=1, description="Overflows until the scale falls. After that, every overflow lowers it.")
    consecutive_hysteresis: bool = Field(
        False, description="Reset the overflow count after each step without overflow. false: only when the scale rises."
    )
    min_scale: float = Field(1.0, gt=0, description="Minimum loss scale. An overflow at this scale ends the run.")
    factor: float = Field(2.0, gt=1, description="Factor by which the scale rises and falls.")

    @model_validator(mode="after")
    def _check_min_scale(self) -> LossScalerConfig:
        if self.min_scale > self.initial_scale:
            raise build_field_error("min_scale", f"{self.min_scale:g} is above initial_scale {self.initial_scale:g}")
        return self


class OptimizerConfig(Section):
    """Optimizer, gradient clipping and loss scaling."""

    method: OptimizerMethod = Field(
        OptimizerMethod.adamw, description="adamw, sgd, or muon: Muon for the matrices of the blocks, AdamW for all other parameters."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay rate of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay rate of the second moment.")
    eps: float = Field(1e-8, gt=0, description="AdamW: epsilon added to the denominator.")
    momentum: float = Field(0.95, ge=0, lt=1, description="SGD and Muon: momentum, the decay of the running sum or mean of gradients.")
    state_precision: StatePrecision = Field(
        StatePrecision.float32, description="Data type of the optimizer state between steps: float32, or bfloat16 for half the memory."
    )
    gradient_clipping: float = Field(1.0, ge=0, description="Maximum global gradient norm. 0: no clipping.")
    zero: bool = Field(False, description="Shard the optimizer state over replicas (ZeRO-1). fsdp and hsdp shard it anyway.")
    loss_scaler: LossScalerConfig = Field(LossScalerConfig(), description="Dynamic loss scaling for float16.")

    @model_validator(mode="after")
    def _check_state_precision(self) -> OptimizerConfig:
        if self.state_precision is StatePrecision.bfloat16:
            for name in ("beta1", "beta2", "momentum"):
                if getattr(self, name) > _MAX_BFLOAT16_DECAY:
                    reason = f"{getattr(self, name):g} is too close to 1 for state_precision: bfloat16, which has 8 significant bits"
                    raise build_field_error(name, reason, f"set at most {_MAX_BFLOAT16_DECAY}, or state_precision: float32")
        return self


class Quantization(StrEnum):
    """Data types of the pseudo-gradients that learners exchange."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


class OuterOptimizerConfig(Section):
    """SGD with Nesterov momentum, which updates the global parameters with the mean pseudo-gradient of the learners."""

    learning_rate: float = Field(0.7, gt=0, description="Outer learning rate. 1 with momentum 0: the mean of the learners' parameters.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Outer Nesterov momentum.")


class DilocoConfig(Section):
    """DiLoCo: learners train independently for a round of steps, then an outer optimizer combines their parameters."""

    inner_steps: int = Field(
        100, ge=1, description="Steps per round. Learners exchange their changes after each round, and after the last step of the run."
    )
    outer_optimizer: OuterOptimizerConfig = Field(OuterOptimizerConfig(), description="Optimizer of the global parameters.")
    quantization: Quantization = Field(
        Quantization.none,
        description="Data type of the exchanged pseudo-gradients. none: that of the parameters. int8, int4: integers with one scale per "
        "256 values, about 1/4 and 1/8 of the bytes of float32.",
    )
    fragments: int = Field(
        1,
        ge=1,
        description="Parts of the model that are exchanged at different steps of a round, each once per round: fewer bytes at a time. "
        "Layer i belongs to part i modulo fragments.",
    )
    overlap: int = Field(
        0,
        ge=0,
        description="Steps for which learners train on while a fragment is exchanged, less than inner_steps / fragments. 0: they wait.",
    )
    mixing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="After an exchange, a learner continues from mixing x its own parameters + (1 - mixing) x the global parameters.",
    )

    @model_validator(mode="after")
    def _check_fragments(self) -> DilocoConfig:
        check_is_multiple("inner_steps", self.inner_steps, "fragments", self.fragments)
        if self.overlap >= self.inner_steps // self.fragments:
            reason = f"{self.overlap} is not less than inner_steps / fragments = {self.inner_steps // self.fragments}"
            raise build_field_error(
                "overlap", reason, "one exchange ends before the next starts: use a smaller overlap, or fewer fragments"
            )
        return self
