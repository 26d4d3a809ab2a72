"""Read a YAML file and `-o key.path=value` overrides into a Config, and report everything that is wrong at once.

Each problem names its key path, its line in the file, and for an unknown key the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from swarmtrain.config import Config
from swarmtrain.errors import ConfigError, Problem, SwarmtrainError

_MAX_BYTES = 1_000_000
_SELECT = re.compile(r"\[(\d+)\]")


class _Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]  # chosen at run time
    """YAML 1.1 less its surprises: 1e-4 is a number, a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


@dataclass
class _Source:
    """The values of a YAML text, with the line of every key path, and what was wrong with the text itself."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in the file at `path`, changed by `overrides` (each `key.path=value`, the value being YAML).

    Raises ConfigError with every problem found, or SwarmtrainError if the file cannot be read.
    """
    return parse(_read(Path(path)), overrides, source=str(path))


def parse(text: str, overrides: Sequence[str] = (), *, source: str | None = None) -> Config:
    """Return the config in `text`. Raises ConfigError with every problem found."""
    found = _compose(text)
    values = found.values if found.values is not None else {}
    if not isinstance(values, dict):
        raise ConfigError((Problem("", f"must be a mapping of keys such as runner and trainer, not {_kind(values)}", 1),), source=source)
    overridden = _override(values, overrides, found.problems)
    try:
        config = Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problems = [*found.problems, *_problems(error, values, found.lines, overridden)]
    except (TypeError, ValueError, RecursionError) as error:
        problems = [*found.problems, Problem("", f"holds a value that a config cannot hold: {error}")]
    else:
        problems = found.problems
    if problems:
        raise ConfigError(tuple(sorted(problems, key=lambda problem: problem.line or 10**9)), source=source)
    return config


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "is a folder")
        if path.stat().st_size > _MAX_BYTES:
            raise SwarmtrainError(
                f"is {path.stat().st_size / 1e6:.0f} MB; a config is at most {_MAX_BYTES / 1e6:.0f} MB",
                place=str(path),
                hint="is it the right file?",
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SwarmtrainError("no such file", place=str(path), hint=f"swarmtrain init {path} writes one to start from") from None
    except UnicodeDecodeError:
        raise SwarmtrainError("is not text", place=str(path), hint="a config is YAML, in UTF-8") from None
    except OSError as error:
        raise SwarmtrainError(error.strerror or str(error), place=str(path)) from None


def _compose(text: str) -> _Source:
    found = _Source()
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _walk(node, (), found)
            found.values = loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", None) or str(error).splitlines()[0]
        line = mark.line + 1 if mark else None
        raise ConfigError((Problem("", f"is not YAML: {reason}", line),)) from None
    finally:
        loader.dispose()
    return found


def _walk(node: yaml.Node, path: tuple[str, ...], found: _Source) -> None:
    """Note the line of each key path and refuse keys that stand twice, of which YAML silently keeps the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            here = (*path, name)
            line = key.start_mark.line + 1
            if name in seen:
                found.problems.append(Problem(".".join(here), "stands twice", line, "keep one of the two"))
            seen.add(name)
            found.lines[".".join(here)] = line
            _walk(value, here, found)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            here = (*path, str(index))
            found.lines[".".join(here)] = value.start_mark.line + 1
            _walk(value, here, found)


def _override(values: dict[str, Any], overrides: Iterable[str], problems: list[Problem]) -> set[str]:
    changed = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        key = _SELECT.sub(r".\1", key.strip())
        if not equals or not key:
            problems.append(Problem("", f"override {override!r} is not of the form key.path=value", hint="-o trainer.train_iterations=100"))
            continue
        try:
            _put(values, key.split("."), yaml.load(text, _Loader) if text.strip() else None)  # noqa: S506  # _Loader is a safe one
            changed.add(key)
        except yaml.YAMLError:
            problems.append(Problem(key, f"override's value {text!r} is not YAML"))
        except (LookupError, TypeError, ValueError) as error:
            problems.append(Problem(key, f"override goes nowhere: {error}"))
    return changed


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    target: Any = values
    for position, key in enumerate(keys):
        last = position == len(keys) - 1
        if isinstance(target, list):
            if not key.isdigit() or int(key) >= len(target):
                raise LookupError(f"{'.'.join(keys[:position])} is a list of {len(target)}, so {key!r} is none of its places")
            index: Any = int(key)
        elif isinstance(target, dict):
            index = key
        else:
            raise TypeError(f"{'.'.join(keys[:position])} is {_kind(target)}, which holds no keys")
        if last:
            target[index] = value
        else:
            if isinstance(target, dict) and target.get(index) is None:
                target[index] = {}
            target = target[index]


def _problems(error: ValidationError, values: Any, lines: dict[str, int], overridden: set[str]) -> list[Problem]:
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
    kind, given = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        known = _fields_at(keys[:-1])
        near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        return "unknown key" + (f"; did you mean {near[0]}?" if near else ""), None if near else f"known here: {', '.join(sorted(known))}"
    if kind == "missing":
        return "is required", None
    message = detail["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("a valid dictionary", "a mapping").replace("a valid array", "a list")
    message = re.sub(r"must be an object", "must be a mapping", message)
    if kind not in ("value_error", "wrong_field"):
        message += f", not {_kind(given)}"
    hint = "quote it" if kind == "string_type" and isinstance(given, bool | int | float) else None
    return message, hint


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


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
