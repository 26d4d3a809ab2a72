"""`learning_rate_scheduler`: learning rate schedule of the default group, inherited by `training_groups`."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.schema.section import Section, build_field_error


class DecayStyle(StrEnum):
    """Shape of the learning rate decay after warmup."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    warmup_stable_decay = "warmup_stable_decay"


class LearningRateSchedulerConfig(Section):
    """Learning rate schedule, a pure function of the step."""

    learning_rate: float = Field(1e-3, ge=0, description="Peak learning rate, reached at the end of the warmup.")
    learning_rate_minimum: float = Field(0.0, ge=0, description="Learning rate at the end of the decay and after it.")
    learning_rate_decay_style: DecayStyle = Field(
        DecayStyle.cosine, description="constant, linear, cosine, or warmup_stable_decay (WSD): constant, then linear decay at the end."
    )
    learning_rate_decay_iters: int | None = Field(
        None, ge=0, description="Step at which the minimum is reached, warmup included. null: trainer.train_iterations."
    )
    learning_rate_decay_steps: int | None = Field(
        None,
        ge=0,
        description="Length of the warmup_stable_decay decay in steps; it ends at learning_rate_decay_iters. null: a "
        "fifth of learning_rate_decay_iters.",
    )
    learning_rate_warmup_steps: int = Field(0, ge=0, description="Warmup length in steps, over which the learning rate rises from 0.")
    learning_rate_warmup_delay_steps: int = Field(0, ge=0, description="Steps at learning rate 0 before the warmup.")

    @model_validator(mode="after")
    def _check_minimum_learning_rate(self) -> LearningRateSchedulerConfig:
        if self.learning_rate_minimum > self.learning_rate:
            raise build_field_error(
                "learning_rate_minimum", f"{self.learning_rate_minimum:g} is above learning_rate {self.learning_rate:g}"
            )
        return self

    @model_validator(mode="after")
    def _check_decay_steps(self) -> LearningRateSchedulerConfig:
        style = self.learning_rate_decay_style
        if self.learning_rate_decay_steps is not None and style is not DecayStyle.warmup_stable_decay:
            hint = "set learning_rate_decay_iters to choose where the decay ends" if style is not DecayStyle.constant else ""
            raise build_field_error(
                "learning_rate_decay_steps", f"applies to learning_rate_decay_style warmup_stable_decay, not to {style}", hint
            )
        return self
