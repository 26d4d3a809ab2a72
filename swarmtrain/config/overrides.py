"""`-o key.path=value`: values put into those that the file gave."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from swarmtrain.config.source import NotYaml, kind, read_yaml
from swarmtrain.errors import Problem

_SELECT = re.compile(r"\[(\d+)\]")
_DEEPEST = 20


def override(values: dict[str, Any], overrides: Iterable[str]) -> tuple[set[str], list[Problem]]:
    """Change `values` in place; return the keys that were changed, and what is wrong with the rest."""
    changed, problems = set(), []
    for item in overrides:
        key, equals, text = item.partition("=")
        key = _SELECT.sub(r".\1", key.strip())
        if not equals or not key:
            problems.append(Problem("", f"override {item!r} is not of the form key.path=value", hint="-o trainer.train_iterations=100"))
            continue
        try:
            found = read_yaml(text)
            _put(values, key.split("."), found.values)
        except NotYaml as error:
            problems.append(Problem(key, f"override's value {text!r} is not YAML: {error}", hint=error.hint))
        except _NowhereError as error:
            problems.append(Problem(key, f"override goes nowhere: {error}"))
        else:
            changed.add(key)
            problems += [Problem(".".join(filter(None, (key, each.path))), each.message, hint=each.hint) for each in found.problems]
    return changed, problems


class _NowhereError(Exception):
    """There is no place of this key."""


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    if len(keys) > _DEEPEST:
        raise _NowhereError("no key lies that deep")
    target: Any = values
    for position, key in enumerate(keys[:-1]):
        index = _index(target, keys, position)
        if isinstance(target, dict) and target.get(key) is None:
            target[key] = {}
        target = target[index]
    target[_index(target, keys, len(keys) - 1)] = value


def _index(target: Any, keys: list[str], position: int) -> Any:
    """Return by what `target` is to be asked for the key at `position`. Raises _NowhereError."""
    key, above = keys[position], ".".join(keys[:position])
    if isinstance(target, dict):
        return key
    if not isinstance(target, list):
        raise _NowhereError(f"{above} is {kind(target)}, which holds no keys")
    if key not in map(str, range(len(target))):
        raise _NowhereError(f"{above} is a list of {len(target)}, so {key!r} is none of its places")
    return int(key)
