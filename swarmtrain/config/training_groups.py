"""`training_groups`: parameters that are trained in a way of their own."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.base import Patterns, Section
from swarmtrain.config.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.config.optimizer import OptimizerMethod


class TrainingGroupConfig(Section):
    """Parameters by name, with their own weight decay and schedule. A parameter in two groups is an error, one in none too."""

    group_name: str = Field(..., min_length=1, description="Name in logs.")
    parameters_include: Patterns | None = Field(None, description="Regular expressions searched in parameter names. null: all.")
    parameters_exclude: Patterns = Field((), description="Regular expressions; what they match is left out.")
    method: OptimizerMethod | None = Field(
        None, description="How this group's parameters are trained: adamw, sgd, or muon (matrices only). null: as optimizer.method has it."
    )
    weight_decay: float = Field(1e-4, ge=0, description="Decoupled weight decay: a step takes learning rate x this off a parameter.")
    independent_weight_decay: bool = Field(
        False, description="A step takes this off, however high learning_rate is, in proportion to the schedule alone."
    )
    learning_rate_scheduler: LearningRateSchedulerConfig | None = Field(
        None, description="Schedule of this group. null: the top-level learning_rate_scheduler."
    )
