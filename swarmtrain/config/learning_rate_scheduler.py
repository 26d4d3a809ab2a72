"""`learning_rate_scheduler`: the schedule of the default group, which `training_groups` inherit."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, wrong


class DecayStyle(StrEnum):
    """Shape of the decay after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    warmup_stable_decay = "warmup_stable_decay"


class LearningRateSchedulerConfig(Section):
    """Learning rate as a pure function of the step."""

    learning_rate: float = Field(1e-3, ge=0, description="Highest learning rate, reached at the end of the warm-up.")
    learning_rate_minimum: float = Field(0.0, ge=0, description="Learning rate at the end of the decay and after it.")
    learning_rate_decay_style: DecayStyle = Field(
        DecayStyle.cosine, description="constant, linear, cosine, or warmup_stable_decay: constant, then linear at the end."
    )
    learning_rate_decay_iters: int | None = Field(
        None, ge=0, description="Step at which the minimum is reached, warm-up included. null: trainer.train_iterations."
    )
    learning_rate_decay_steps: int | None = Field(
        None,
        ge=0,
        description="With warmup_stable_decay: steps of the decay, the last of them learning_rate_decay_iters. null: a fifth of it.",
    )
    learning_rate_warmup_steps: int = Field(0, ge=0, description="Steps over which it rises from 0.")
    learning_rate_warmup_delay_steps: int = Field(0, ge=0, description="Steps for which it stays 0 before that.")

    @model_validator(mode="after")
    def _minimum_is_lower(self) -> LearningRateSchedulerConfig:
        if self.learning_rate_minimum > self.learning_rate:
            raise wrong("learning_rate_minimum", f"{self.learning_rate_minimum:g} is above learning_rate {self.learning_rate:g}")
        return self

    @model_validator(mode="after")
    def _decay_is_meant(self) -> LearningRateSchedulerConfig:
        style = self.learning_rate_decay_style
        if self.learning_rate_decay_steps is not None and style is not DecayStyle.warmup_stable_decay:
            hint = "learning_rate_decay_iters is where its decay ends" if style is not DecayStyle.constant else ""
            raise wrong("learning_rate_decay_steps", f"is for warmup_stable_decay, not for learning_rate_decay_style {style}", hint)
        return self
