"""Read a YAML file and `-o key.path=value` overrides into a Config, and report everything that is wrong at once.

Each problem names its key path, its line in the file, and for an unknown key the nearest known one.
"""

from __future__ import annotations

import difflib
import errno
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from swarmtrain.config import Config
from swarmtrain.config.files import Unreadable, read
from swarmtrain.config.overrides import override
from swarmtrain.config.source import NotYaml, kind, read_yaml
from swarmtrain.errors import ConfigError, Problem, SwarmtrainError

_MAX_BYTES = 1_000_000
_HELP = {errno.ENOENT: "swarmtrain init {} writes one to start from", errno.EACCES: "ls -l {} shows who may read it"}
_MOST_PROBLEMS = 50
_LONGEST_MESSAGE, _LONGEST_KEY = 400, 80


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in the file at `path`, changed by `overrides` (each `key.path=value`, the value being YAML).

    Raises ConfigError with every problem found, or SwarmtrainError if the file cannot be read.
    """
    return parse(_text(Path(path)), overrides, source=str(path))


def parse(text: str, overrides: Sequence[str] = (), *, source: str | None = None) -> Config:
    """Return the config in `text`. Raises ConfigError with every problem found."""
    try:
        found = read_yaml(text)
    except NotYaml as error:
        raise ConfigError(_in_order([Problem("", f"is not YAML: {error}", error.line, error.hint)]), source=source) from None
    values = found.values
    if not isinstance(values, dict):
        raise ConfigError(_in_order([_no_mapping(values, source)]), source=source)
    overridden, problems = override(values, overrides)
    problems = [*found.problems, *problems]
    try:
        config = Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        known = {problem.path for problem in problems}
        problems += [problem for problem in _problems(error, found.lines, overridden) if problem.path not in known]
    except ValueError as error:
        problems.append(Problem("", f"holds a value that a config cannot hold: {error}"))
    if problems:
        raise ConfigError(_in_order(problems), source=source)
    return config


def _text(path: Path) -> str:
    try:
        content = read(path, _MAX_BYTES)
    except Unreadable as error:
        raise SwarmtrainError(
            str(error), place=str(path), hint=_HELP.get(error.number, "a config is a small YAML file").format(path)
        ) from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = f"iconv -f UTF-16 -t UTF-8 {path}" if wide else "is it the right file?"
        raise SwarmtrainError("is UTF-16; a config is UTF-8" if wide else "is not text", place=str(path), hint=hint)
    return text


def _no_mapping(values: Any, source: str | None) -> Problem:
    if values is None:
        name = source or "config.yml"
        return Problem(
            "", "holds nothing", hint=f"swarmtrain init {name} --force writes every key with its default; {{}} means all of these"
        )
    return Problem("", f"must be a mapping of keys such as runner and trainer, not {kind(values)}", 1)


def _in_order(problems: list[Problem]) -> tuple[Problem, ...]:
    """Sort by line, fit for a terminal; of a file that is wrong all over, the first problems say enough."""
    shown = (
        replace(
            problem, path=_shown(problem.path, _LONGEST_KEY), message=_shown(problem.message), hint=problem.hint and _shown(problem.hint)
        )
        for problem in problems
    )
    found = sorted(shown, key=lambda problem: problem.line or 10**9)
    more = len(found) - _MOST_PROBLEMS
    return (*found[:_MOST_PROBLEMS], *([Problem("", f"and {more} more problems like these")] if more > 0 else ()))


def _problems(error: ValidationError, lines: dict[str, int], overridden: set[str]) -> list[Problem]:
    problems = []
    for detail in error.errors(include_url=False):
        keys = [str(key) for key in detail["loc"]]
        keys = keys[:-1] if keys and keys[-1] == "[key]" else keys
        if detail["type"] == "wrong_field":
            keys.append(detail["ctx"]["name"])
        path = ".".join(keys)
        by_override = any(path == key or key.startswith(f"{path}.") or path.startswith(f"{key}.") for key in overridden)
        message, hint = _explain(detail, keys)
        problems.append(Problem(path, message, None if by_override else _line(path, lines), hint))
    return problems


def _line(path: str, lines: dict[str, int]) -> int | None:
    """Return the line of `path`, or that of the innermost section around it which the file has."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path)


def _explain(detail: ErrorDetails, keys: list[str]) -> tuple[str, str | None]:
    code, given = detail["type"], detail.get("input")
    if code == "extra_forbidden":
        known = _fields_at(keys[:-1])
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


def _fields_at(keys: list[str]) -> list[str]:
    model: Any = Config
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


def _shown(text: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Return `text` fit for a terminal: in one piece of bearable length, control characters written out."""
    plain = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:longest])
    return plain if len(text) <= longest else f"{plain}…"
