"""Check that a checkpoint has the parameters of the current model, and the state of the current optimizer."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from swarmtrain.config.schema.trainer import TrainerConfig
from swarmtrain.errors import IncompatibleCheckpoint
from swarmtrain.trainer.model.peft import ADAPTER_KEY, LORA_KEY

TensorShapes = Mapping[str, tuple[int, ...]]
_MODEL_PREFIX, _OPTIMIZER_PREFIX = "model/", "optimizer/"


@dataclass(frozen=True)
class LoadRules:
    """Which tensors are loaded from a checkpoint, and which differences are allowed.

    Patterns are regular expressions that are searched for in parameter names (`re.search`).
    """

    ignored_patterns: tuple[str, ...] = ()
    allowed_missing: tuple[str, ...] = ()
    allowed_unexpected: tuple[str, ...] = ()
    load_optimizer_state: bool = True
    should_log: bool = True
    """Whether to log which tensors are loaded; set if the rules may exclude tensors."""

    @classmethod
    def from_config(cls, config: TrainerConfig) -> LoadRules:
        """Return the rules that the trainer config sets for checkpoints in trainer.load_dir."""
        # LoRA and adapters may be added to a model that was trained without them.
        missing = (*config.allowed_missing_keys_in_checkpoint, re.escape(LORA_KEY), re.escape(ADAPTER_KEY))
        unexpected = config.allowed_unexpected_keys_in_checkpoint
        return cls(config.ignore_keys_in_checkpoint, missing, unexpected, config.load_optimizer_states)

    def should_load_tensor(self, name: str) -> bool:
        """Return whether to load the tensor `name` (model/… or optimizer/…), if the checkpoint has it."""
        return not _matches_any_pattern(self.ignored_patterns, name) and (self.load_optimizer_state or name.startswith(_MODEL_PREFIX))

    def is_missing_allowed(self, tensor_name: str, *, in_checkpoint: bool, in_model: bool) -> bool:
        """Return whether the parameter `tensor_name` may be missing in the checkpoint or in the model. True if both have it.

        `in_checkpoint`: whether the checkpoint has the parameter; `in_model`: whether the model has it.
        """
        if _matches_any_pattern(self.ignored_patterns, tensor_name):
            return True
        return (in_checkpoint or _matches_any_pattern(self.allowed_missing, tensor_name)) and (
            in_model or _matches_any_pattern(self.allowed_unexpected, tensor_name)
        )


LOAD_EVERYTHING = LoadRules(should_log=False)


def select_tensors_to_load(
    available_shapes: TensorShapes, expected_shapes: TensorShapes, place: str, rules: LoadRules = LOAD_EVERYTHING, config_changes: str = ""
) -> list[str]:
    """Return the names of the tensors in `expected_shapes` to load from a checkpoint whose tensors are `available_shapes`.

    `available_shapes` and `expected_shapes` map tensor names (model/PARAMETER or optimizer/MOMENT/PARAMETER) to shapes. Optimizer state is
    initialized instead of loaded if the checkpoint lacks all state of a parameter, or state that does not belong to a single parameter.
    `place` names the checkpoint in errors. `config_changes` is appended to the error message for a different model.

    Raises IncompatibleCheckpoint if the checkpoint belongs to another model, or has the state of another optimizer.
    """
    mismatched = [
        name
        for name in sorted(available_shapes.keys() | expected_shapes.keys())
        if name.startswith(_MODEL_PREFIX) and available_shapes.get(name) != expected_shapes.get(name)
    ]
    if mismatched := [name for name in mismatched if not (_is_allowed_difference(available_shapes, expected_shapes, name, rules))]:
        name = mismatched[0]
        saved_size, current_size = available_shapes.get(name, "missing"), expected_shapes.get(name, "missing")
        raise IncompatibleCheckpoint(
            f"belongs to a different model: {name} is {saved_size} in the checkpoint and {current_size} in the model; "
            f"mismatched parameters: {len(mismatched)}{config_changes}",
            place=place,
            hint="restore the previous transformer_architecture, or choose another trainer.save_dir",
        )
    loadable = {name: size for name, size in available_shapes.items() if rules.should_load_tensor(name)}
    saved_kinds, expected_kinds = _group_moment_names_by_parameter(loadable), _group_moment_names_by_parameter(expected_shapes)
    for name in sorted(expected_kinds):
        if f"{_MODEL_PREFIX}{name}" in loadable and saved_kinds[name] and saved_kinds[name] != expected_kinds[name]:
            _raise_optimizer_mismatch(name, saved_kinds[name], expected_kinds[name], place)
    return [name for name in expected_shapes if name in loadable]


def assign_source_checkpoints(tensor_names_by_checkpoint: Sequence[Collection[str]]) -> dict[str, int]:
    """Return for each tensor the index of the checkpoint to load it from, given the tensor names of each checkpoint.

    A parameter is loaded from the first checkpoint that has it. Optimizer state is loaded from the same checkpoint as its parameter, or
    not loaded, since it matches only the parameter's values in that checkpoint.
    """
    source_of: dict[str, int] = {}
    source_of_parameter: dict[str, int] = {}
    for number, names in enumerate(tensor_names_by_checkpoint):
        for name in names:
            if name.startswith(_MODEL_PREFIX):
                source_of_parameter.setdefault(name.removeprefix(_MODEL_PREFIX), number)
        for name in names:
            parameter = name.removeprefix(_MODEL_PREFIX) if name.startswith(_MODEL_PREFIX) else name.split("/", 2)[-1]
            if source_of_parameter.get(parameter, number) == number:
                source_of.setdefault(name, number)
    return source_of


def describe_loaded_tensors(available_shapes: TensorShapes, expected_shapes: TensorShapes, loaded_names: Sequence[str]) -> str:
    """Return a log message about the loaded tensors `loaded_names`: how many are loaded, and which parameters are not."""
    clauses = []
    for kind, noun in ((_MODEL_PREFIX, "parameters"), (_OPTIMIZER_PREFIX, "tensors of optimizer state")):
        expected_names, available_names = (
            [name for name in sizes if name.startswith(kind)] for sizes in (expected_shapes, available_shapes)
        )
        taken = {name for name in loaded_names if name.startswith(kind)}
        clauses.append(f"{len(taken)} of {len(expected_names)} {noun} loaded")
        for label, remaining in (
            ("start from scratch", [name for name in expected_names if name not in taken]),
            ("not loaded", [n for n in available_names if n not in taken]),
        ):
            if remaining and kind == _MODEL_PREFIX:
                clauses.append(f"{label}: {', '.join(name.removeprefix(kind) for name in sorted(remaining))}")
    return "; ".join(clauses)


def diff_configs(saved_config: Mapping[str, Any], current_config: Mapping[str, Any], section_path: str) -> list[str]:
    """Return one line with the saved and the current value for each config key whose values differ.

    `section_path`: path of the compared section in the config. Keys that only one of the configs has are ignored.
    """
    lines = []
    for name in saved_config.keys() & current_config.keys():
        saved_value, current_value = saved_config[name], current_config[name]
        if isinstance(saved_value, dict) and isinstance(current_value, dict):
            lines += diff_configs(saved_value, current_value, f"{section_path}.{name}")
        elif saved_value != current_value:
            lines.append(
                f"{section_path}.{name} is {json.dumps(saved_value)} in the checkpoint and {json.dumps(current_value)} in the config"
            )
    return sorted(lines)


def _is_allowed_difference(available_shapes: TensorShapes, expected_shapes: TensorShapes, tensor_name: str, rules: LoadRules) -> bool:
    """Return whether the difference of the tensor `tensor_name` between checkpoint and model is allowed.

    A tensor may be missing in the checkpoint or in the model if `rules` allow it. If both have it, its shapes may differ only if it is
    not loaded.
    """
    in_checkpoint, in_model = tensor_name in available_shapes, tensor_name in expected_shapes
    return rules.is_missing_allowed(tensor_name, in_checkpoint=in_checkpoint, in_model=in_model) and (
        not (in_checkpoint and in_model) or not rules.should_load_tensor(tensor_name)
    )


def _matches_any_pattern(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name.rpartition("/")[2]) for pattern in patterns)


def _raise_optimizer_mismatch(
    parameter_name: str, saved_moment_names: Iterable[str], expected_moment_names: Iterable[str], place: str
) -> NoReturn:
    raise IncompatibleCheckpoint(
        f"has the state of a different optimizer: for {parameter_name} it has {' and '.join(sorted(saved_moment_names))}, but "
        f"{' and '.join(sorted(expected_moment_names))} is expected",
        place=place,
        hint="restore the previous optimizer.method (or the group's) and topology.learners, or choose another trainer.save_dir",
    )


def _group_moment_names_by_parameter(shapes: TensorShapes) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in shapes:
        group, _, remainder = name.partition("/")
        if group == "optimizer":
            kind, _, parameter = remainder.partition("/")
            kinds[parameter].add(kind)
    return kinds
