"""What pydantic says of wrong values, in the words of the rest: key path, line, reason, and for an unknown key the nearest known one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from swarmtrain.config.source import kind
from swarmtrain.errors import Problem


def explain(
    error: ValidationError, model: type[BaseModel], lines: Mapping[str, int], overridden: Collection[str] = (), *, prefix: str = ""
) -> list[Problem]:
    """Return what is wrong with the values that `model` refused, whose keys begin with `prefix`.

    `lines` has the line of each key path in the file; what stands in `overridden` comes from elsewhere.
    """
    problems = []
    for detail in error.errors(include_url=False):
        keys = [str(key) for key in detail["loc"]]
        keys = keys[:-1] if keys and keys[-1] == "[key]" else keys
        if detail["type"] == "wrong_field":
            keys.append(detail["ctx"]["name"])
        path = f"{prefix}{'.'.join(keys)}"
        by_override = any(path == key or key.startswith(f"{path}.") or path.startswith(f"{key}.") for key in overridden)
        message, hint = _message(detail, keys, model)
        problems.append(Problem(path, message, None if by_override else _line(path, lines), hint))
    return problems


def _line(path: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of `path`, or that of the innermost section around it which the file has."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path)


def _message(detail: ErrorDetails, keys: list[str], model: type[BaseModel]) -> tuple[str, str | None]:
    code, given = detail["type"], detail.get("input")
    if code == "extra_forbidden":
        known = _fields_at(keys[:-1], model)
        near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        return "unknown key" + (f"; did you mean {near[0]}?" if near else ""), None if near else f"known here: {', '.join(sorted(known))}"
    if code == "missing":
        return "is required", None
    message = detail["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("a valid dictionary", "a mapping").replace("a valid array", "a list")
    message = re.sub(r"must be an object", "must be a mapping", message)
    if code not in ("value_error", "wrong_field"):
        message += f", not {kind(given)}"
    if code == "string_type" and isinstance(given, bool | int | float):
        return message, "quote it"
    return message, detail.get("ctx", {}).get("hint") or None


def _fields_at(keys: list[str], root: type[BaseModel]) -> list[str]:
    model: Any = root
    for key in keys:
        if key.isdigit():
            continue
        if not (isinstance(model, type) and issubclass(model, BaseModel) and key in model.model_fields):
            return []
        model = _model_in(model.model_fields[key].annotation)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)
