"""`training_groups`: parameter groups with their own optimizer settings."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.schema.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.config.schema.optimizer import OptimizerMethod
from swarmtrain.config.schema.section import RegexPatterns, Section


class TrainingGroupConfig(Section):
    """A parameter group, selected by name, with its own weight decay and schedule. Every parameter must be in exactly one group."""

    group_name: str = Field(..., min_length=1, description="Name of the group in logs.")
    parameters_include: RegexPatterns | None = Field(
        None, description="Regular expressions, searched in parameter names: matches are in the group. null: all."
    )
    parameters_exclude: RegexPatterns = Field(
        (), description="Regular expressions, searched in parameter names: matches are not in the group."
    )
    method: OptimizerMethod | None = Field(
        None, description="Optimizer of this group: adamw, sgd, or muon (matrices only). null: optimizer.method."
    )
    weight_decay: float = Field(
        1e-4, ge=0, description="Decoupled weight decay: each step subtracts learning rate x weight_decay x parameter."
    )
    independent_weight_decay: bool = Field(
        False, description="Make weight decay independent of learning_rate: it is scaled by the schedule only."
    )
    learning_rate_scheduler: LearningRateSchedulerConfig | None = Field(
        None, description="Learning rate schedule of this group. null: the top-level learning_rate_scheduler."
    )
