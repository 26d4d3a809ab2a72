"""Apply `-o key.path=value` overrides to the values of a config file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from swarmtrain.config.yaml_document import YamlSyntaxError, describe_value, read_yaml
from swarmtrain.errors import Problem

_INDEX_SUFFIX = re.compile(r"\[(\d+)\]")
_MAX_DEPTH = 20


def apply_overrides(config_values: dict[str, Any], overrides: Iterable[str]) -> tuple[set[str], list[Problem]]:
    """Apply `overrides` to `config_values` in place. Return the changed key paths, and a problem for each invalid override."""
    changed, problems = set(), []
    for item in overrides:
        key, equals, text = item.partition("=")
        key = _INDEX_SUFFIX.sub(r".\1", key.strip())
        if not equals or not key:
            problems.append(
                Problem("", f"override {item!r} is not of the form key.path=value", hint="for example: -o trainer.train_iterations=100")
            )
            continue
        try:
            key_path = key.split(".")
            document = read_yaml(text, tuple(key_path))
            _set_value_at_path(config_values, key_path, document.values)
        except YamlSyntaxError as error:
            problems.append(Problem(key, f"override's value {text!r} is not valid YAML: {error}", hint=error.hint))
        except _NoSuchKeyError as error:
            problems.append(Problem(key, f"override cannot be applied: {error}"))
        else:
            changed.add(key)
            problems += [
                Problem(".".join(filter(None, (key, problem.path))), problem.message, hint=problem.hint) for problem in document.problems
            ]
    return changed, problems


class _NoSuchKeyError(Exception):
    """Raised if a key of an override does not exist and cannot be created."""


def _set_value_at_path(config_values: dict[str, Any], key_path: list[str], value: Any) -> None:
    if len(key_path) > _MAX_DEPTH:
        raise _NoSuchKeyError("the key path is too deep")
    target: Any = config_values
    for position, key in enumerate(key_path[:-1]):
        index = _resolve_key_or_index(target, key_path, position)
        if isinstance(target, dict) and target.get(key) is None:
            target[key] = {}
        target = target[index]
    target[_resolve_key_or_index(target, key_path, len(key_path) - 1)] = value


def _resolve_key_or_index(container: Any, key_path: list[str], position: int) -> Any:
    """Return the mapping key or list index of `container` at `key_path[position]`. Raises _NoSuchKeyError if it does not exist."""
    key, parent_path = key_path[position], ".".join(key_path[:position])
    if isinstance(container, dict):
        return key
    if not isinstance(container, list):
        raise _NoSuchKeyError(f"{parent_path} is {describe_value(container)}, which has no keys")
    if key not in map(str, range(len(container))):
        raise _NoSuchKeyError(f"{parent_path} is a list of {len(container)}, so {key!r} is out of range")
    return int(key)
