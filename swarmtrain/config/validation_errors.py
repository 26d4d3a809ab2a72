"""Convert pydantic's validation errors to config problems.

Each problem has a key path, a line and a reason; for an unknown key, also the most similar known key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from swarmtrain.config.yaml_document import describe_value
from swarmtrain.errors import Problem

# A guess below this similarity, of 0 to 1, is more often wrong than right: the list of known keys is better.
_MIN_SIMILARITY = 0.7


def convert_validation_error(
    error: ValidationError,
    section_class: type[BaseModel],
    line_by_key_path: Mapping[str, int],
    overridden_keys: Collection[str] = (),
    *,
    prefix: str = "",
) -> list[Problem]:
    """Return the problems in values that failed validation by the pydantic class `section_class`, with key paths prefixed by `prefix`.

    `line_by_key_path` maps each key path to its line in the file. Keys in `overridden_keys` come from the command line, so they have no
    line.
    """
    problems = []
    for detail in error.errors(include_url=False):
        keys = [str(key) for key in detail["loc"]]
        keys = keys[:-1] if keys and keys[-1] == "[key]" else keys
        if detail["type"] == "wrong_field":
            keys.append(detail["ctx"]["name"])
        path = f"{prefix}{'.'.join(keys)}"
        is_overridden = any(path == key or key.startswith(f"{path}.") or path.startswith(f"{key}.") for key in overridden_keys)
        message, hint = _build_problem_message(detail, keys, section_class)
        problems.append(Problem(path, message, None if is_overridden else _find_key_line(path, line_by_key_path), hint))
    return problems


def _find_key_line(key_path: str, line_by_key_path: Mapping[str, int]) -> int | None:
    """Return the line of the key path `key_path`; if it is not in the file, the line of its innermost enclosing section, or None."""
    while key_path and key_path not in line_by_key_path:
        key_path = key_path.rpartition(".")[0]
    return line_by_key_path.get(key_path)


def _build_problem_message(error_details: ErrorDetails, key_path: list[str], section_class: type[BaseModel]) -> tuple[str, str | None]:
    code, value = error_details["type"], error_details.get("input")
    if code == "extra_forbidden":
        field_names = _list_field_names(key_path[:-1], section_class)
        close_matches = difflib.get_close_matches(key_path[-1], field_names, n=1, cutoff=_MIN_SIMILARITY)
        return "unknown key" + (
            f"; did you mean {close_matches[0]}?" if close_matches else ""
        ), None if close_matches else f"known keys: {', '.join(sorted(field_names))}"
    if code == "missing":
        return "is required", None
    if code in ("too_short", "string_too_short") and not value:
        return "must not be empty", None
    message = error_details["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("a valid dictionary", "a mapping").replace("a valid array", "a list")
    message = re.sub(r"must be an object", "must be a mapping", message)
    if code not in ("value_error", "wrong_field"):
        message += f", not {describe_value(value)}"
    if code == "string_type" and isinstance(value, bool | int | float):
        return message, "quote it"
    return message, error_details.get("ctx", {}).get("hint") or None


def _list_field_names(key_path: list[str], root_section_class: type[BaseModel]) -> list[str]:
    model: Any = root_section_class
    is_mapping = False
    for key in key_path:
        if key.isdigit() or is_mapping:  # an index, or a key that the user has chosen
            is_mapping = False
            continue
        if not (isinstance(model, type) and issubclass(model, BaseModel) and key in model.model_fields):
            return []
        annotation = model.model_fields[key].annotation
        model, is_mapping = _find_pydantic_model(annotation), get_origin(annotation) is dict
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _find_pydantic_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _find_pydantic_model(argument)) is not None), None)
