"""Training groups: assign every parameter to one group with its own update rule, weight decay and learning rate schedule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmtrain.config import Config
from swarmtrain.config.schema.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.config.schema.optimizer import OptimizerMethod
from swarmtrain.config.schema.training_groups import TrainingGroupConfig
from swarmtrain.errors import TrainingError

_MAX_SHOWN_NAMES = 5
_MATRIX_DIMENSIONS = 2


@dataclass(frozen=True)
class ParameterGroup:
    """Names of parameters that share update rule, weight decay and learning rate schedule."""

    name: str
    parameter_names: tuple[str, ...]
    method: OptimizerMethod | None
    """Update rule of the group; None: `choose_optimizer_method` selects one for each parameter."""
    weight_decay: float
    """Weight decay: a step multiplies parameters by 1 - learning rate x weight decay."""
    schedule: LearningRateSchedulerConfig
    independent_weight_decay: bool = False
    """Whether the amount of weight decay is independent of the learning rate."""


def build_parameter_groups(parameter_names: Sequence[str], config: Config) -> list[ParameterGroup]:
    """Assign `parameter_names` to the config's training groups; without groups, to one group with the default weight decay.

    Raises TrainingError if a group matches no parameter, or if parameters are in several groups or in none; the message names them.
    """
    group_configs = config.training_groups or (TrainingGroupConfig(group_name="all"),)
    groups = [
        ParameterGroup(
            group.group_name,
            tuple(name for name in parameter_names if _matches_group(group, name)),
            group.method,
            _compute_weight_decay(group, schedule),
            schedule,
            group.independent_weight_decay,
        )
        for group in group_configs
        for schedule in (group.learning_rate_scheduler or config.learning_rate_scheduler,)
    ]
    groups_by_name = {name: [group.name for group in groups if name in group.parameter_names] for name in parameter_names}
    if empty := [group.name for group in groups if not group.parameter_names]:
        raise _build_group_error(f"no parameter is in {_format_parameter_names(empty)}", parameter_names)
    if duplicated := {name: group_names for name, group_names in groups_by_name.items() if len(group_names) > 1}:
        name, group_names = next(iter(duplicated.items()))
        raise _build_group_error(
            f"{_format_parameter_names(duplicated)}: in more than one group ({name} in {' and '.join(group_names)})", parameter_names
        )
    if ungrouped := [name for name, group_names in groups_by_name.items() if not group_names]:
        raise _build_group_error(f"{_format_parameter_names(ungrouped)}: in no group", parameter_names)
    return groups


def _compute_weight_decay(group: TrainingGroupConfig, schedule: LearningRateSchedulerConfig) -> float:
    if not group.independent_weight_decay:
        return group.weight_decay
    # Wortsman et al. 2023 (arXiv 2309.14322): the effective weight decay does not depend on the learning rate.
    return group.weight_decay / schedule.learning_rate if schedule.learning_rate else 0.0


def choose_optimizer_method(
    group: ParameterGroup, parameter_name: str, dimensions: int, default_method: OptimizerMethod
) -> OptimizerMethod:
    """Return the update rule for `parameter_name` of `group`. `dimensions`: number of the parameter's dimensions.

    If the group sets no method, `default_method` of the config applies. Muon is then used only for the matrices of blocks; embeddings,
    the output layer and norms use AdamW. Raises TrainingError if the group sets Muon for a parameter that is not a matrix.
    """
    if group.method is OptimizerMethod.muon and dimensions != _MATRIX_DIMENSIONS:
        raise TrainingError(
            f"{parameter_name} has {dimensions} dimensions, but Muon supports only matrices",
            place=f"config training_groups, group {group.name}",
            hint="move it to another group with parameters_exclude, or omit method: norms then use AdamW",
        )
    if group.method is not None:
        return group.method
    if default_method is OptimizerMethod.muon and not (dimensions == _MATRIX_DIMENSIONS and parameter_name.startswith("blocks.")):
        return OptimizerMethod.adamw
    return default_method


def _matches_group(group: TrainingGroupConfig, parameter_name: str) -> bool:
    included = group.parameters_include is None or any(re.search(pattern, parameter_name) for pattern in group.parameters_include)
    return included and not any(re.search(pattern, parameter_name) for pattern in group.parameters_exclude)


def _format_parameter_names(names: Iterable[str]) -> str:
    names = list(names)
    hidden_count = len(names) - _MAX_SHOWN_NAMES
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + (f" and {hidden_count} more" if hidden_count > 0 else "")


def _build_group_error(message: str, parameter_names: Sequence[str]) -> TrainingError:
    return TrainingError(
        message, place="config training_groups", hint=f"use parameter names such as {_format_parameter_names(parameter_names)}"
    )
