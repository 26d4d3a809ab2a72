"""`training_groups`: parameters that are trained in a way of their own."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from swarmtrain.config.base import Section
from swarmtrain.config.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.config.optimizer import OptimizerMethod


def _patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return patterns


Patterns = Annotated[tuple[str, ...], AfterValidator(_patterns)]


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
