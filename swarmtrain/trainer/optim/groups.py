"""Training groups: which parameter is trained how. Every parameter is in exactly one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmtrain.config import Config
from swarmtrain.config.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.config.optimizer import OptimizerMethod
from swarmtrain.config.training_groups import TrainingGroupConfig
from swarmtrain.errors import TrainingError

_SHOWN = 5
_MATRIX = 2


@dataclass(frozen=True)
class Group:
    """Parameters, by name, that share weight decay and schedule."""

    name: str
    parameters: tuple[str, ...]
    method: OptimizerMethod | None
    """What trains them; None: what `method` finds."""
    weight_decay: float
    """What a step takes off, as a part of its learning rate."""
    schedule: LearningRateSchedulerConfig
    independent: bool = False
    """Whether weight decay is the same at every learning rate."""


def divide(names: Sequence[str], config: Config) -> list[Group]:
    """Divide the parameters `names` into the config's groups; without any, into one of all with a group's default weight decay.

    Raises TrainingError for a group that matches nothing, and for parameters in several groups or in none, naming them.
    """
    wanted = config.training_groups or (TrainingGroupConfig(group_name="all"),)
    groups = [
        Group(
            group.group_name,
            tuple(name for name in names if _matches(group, name)),
            group.method,
            _weight_decay(group, schedule),
            schedule,
            group.independent_weight_decay,
        )
        for group in wanted
        for schedule in (group.learning_rate_scheduler or config.learning_rate_scheduler,)
    ]
    owners = {name: [group.name for group in groups if name in group.parameters] for name in names}
    if empty := [group.name for group in groups if not group.parameters]:
        raise _wrong(f"no parameter is in {_list(empty)}", names)
    if shared := {name: inside for name, inside in owners.items() if len(inside) > 1}:
        name, inside = next(iter(shared.items()))
        raise _wrong(f"{_list(shared)}: in more than one group ({name} in {' and '.join(inside)})", names)
    if lost := [name for name, inside in owners.items() if not inside]:
        raise _wrong(f"{_list(lost)}: in no group", names)
    return groups


def _weight_decay(group: TrainingGroupConfig, schedule: LearningRateSchedulerConfig) -> float:
    if not group.independent_weight_decay:
        return group.weight_decay
    # Wortsman et al. 2023 (arXiv 2309.14322): another learning rate is another speed, and no other weight decay.
    return group.weight_decay / schedule.learning_rate if schedule.learning_rate else 0.0


def method(group: Group, name: str, dimensions: int, usual: OptimizerMethod) -> OptimizerMethod:
    """Return what trains the parameter `name` of `group`, where `usual` is the config's method.

    Muon is for the matrices of blocks; embeddings, the output layer and norms are left to AdamW, unless the group says so.
    Raises TrainingError if it says Muon of what is no matrix.
    """
    if group.method is OptimizerMethod.muon and dimensions != _MATRIX:
        raise TrainingError(
            f"{name} has {dimensions} dimensions, and Muon is for matrices",
            place=f"config training_groups, group {group.name}",
            hint="leave it to another group by parameters_exclude, or leave method out: norms then go to AdamW",
        )
    if group.method is not None:
        return group.method
    if usual is OptimizerMethod.muon and not (dimensions == _MATRIX and name.startswith("blocks.")):
        return OptimizerMethod.adamw
    return usual


def _matches(group: TrainingGroupConfig, name: str) -> bool:
    included = group.parameters_include is None or any(re.search(pattern, name) for pattern in group.parameters_include)
    return included and not any(re.search(pattern, name) for pattern in group.parameters_exclude)


def _list(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _wrong(message: str, names: Sequence[str]) -> TrainingError:
    return TrainingError(message, place="config training_groups", hint=f"parameters are named like {_list(names)}")
