"""YAML text → plain values, with the line of every key path and all that is wrong with the text itself.

What comes out can be written as JSON and goes through validation in no time, whatever came in: nothing is nested too
deeply, no alias makes millions of values of a few, and no two places share one value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from swarmtrain.errors import Problem

_DEEPEST = 50
_MOST_VALUES = 100_000
_MOST = 1 << 63
_FLOAT = (
    r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# What libyaml complains of, and what it usually comes from.
_HINTS = (
    ("cannot start any token", "YAML takes no tabs for indentation, and a value that begins with @ ` or % needs quotes"),
    ("mapping values are not allowed", "quote a value that holds a colon and a space"),
    ("undefined alias", "quote a value that begins with *"),
    ("scanning an alias", "quote a value that begins with *"),
    ("constructor for the tag", "quote a value that begins with !"),
    ("another document", "a config is one document: remove the line ---"),
)


T = TypeVar("T")


class NotYaml(Exception):
    """The text cannot be read at all; `line` is 1-based."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        self.hint = next((hint for words, hint in _HINTS if words in reason), None)


class _Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]  # chosen at run time
    """YAML 1.1 less its surprises: 1e-4 is a number, a date is text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
            raise yaml.constructor.ConstructorError(
                None, None, f"{kind(node.value)} is no {node.tag.rpartition(':')[2]}", node.start_mark
            ) from None


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


@dataclass
class Source:
    """The values of a YAML text, None if it has none; the line of each key path; what is wrong in single places."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str) -> Source:
    """Return what `text` holds. Raises NotYaml."""
    try:
        _with_loader(text, _check_depth)
        node = _with_loader(text, lambda loader: loader.get_single_node())
        if node is None:
            return Source()
        reading = _Reading()
        reading.note(node, ())
        values = _with_loader("", lambda loader: loader.construct_document(node))
        return Source(reading.plain(values, ()), reading.lines, reading.problems)
    except yaml.reader.ReaderError as error:
        line = 1 + text.encode(errors="replace")[: error.position].count(b"\n")
        raise NotYaml(f"{error.reason} (character {error.character!r})", line) from None
    except yaml.MarkedYAMLError as error:
        raise NotYaml(_reason(error), error.problem_mark.line + 1 if error.problem_mark else None) from None
    except UnicodeEncodeError:
        raise NotYaml("it holds half a character") from None


def _with_loader(text: str, act: Callable[[Any], T]) -> T:
    loader = _Loader(text)
    try:
        return act(loader)
    finally:
        loader.dispose()


def _check_depth(loader: Any) -> None:
    """Refuse what would need a deep recursion, of which the C parser dies."""
    depth = 0
    while loader.check_event():
        event = loader.get_event()
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise NotYaml("nested too deeply", event.start_mark.line + 1)


def _reason(error: yaml.MarkedYAMLError) -> str:
    if error.context and error.context.startswith("while"):
        begun = (
            error.context_mark.line + 1
            if error.context_mark and error.problem_mark and error.context_mark.line != error.problem_mark.line
            else 0
        )
        return f"{error.problem} {error.context}{f' that begins in line {begun}' if begun else ''}"
    return ", ".join(part for part in (error.context, error.problem) if part)


class _Reading:
    """What is noted on the way through one document."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._count = 0

    def note(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        """Note the line of each key path and refuse keys that stand twice, of which YAML silently keeps the last."""
        self._count += 1
        if len(path) > _DEEPEST:
            raise NotYaml("nested too deeply", node.start_mark.line + 1)
        if self._count > _MOST_VALUES:
            raise NotYaml("it holds too much, by its aliases or without", node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                here, line = (*path, name), key.start_mark.line + 1
                if name in seen:
                    self.problems.append(Problem(".".join(here), "stands twice", line, "keep one of the two"))
                seen.add(name)
                self.lines[".".join(here)] = line
                self.note(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                here = (*path, str(index))
                self.lines[".".join(here)] = value.start_mark.line + 1
                self.note(value, here)

    def plain(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a copy of `value` that JSON can hold, less what it cannot: those are problems."""
        if isinstance(value, dict):
            kept = {key: item for key, item in value.items() if self._fits(key, (*path, str(key)), key=True)}
            return {key: self.plain(item, (*path, str(key))) for key, item in kept.items()}
        if isinstance(value, list):
            return [self.plain(item, (*path, str(index))) for index, item in enumerate(value)]
        return value if self._fits(value, path) else None

    def _fits(self, value: Any, path: tuple[str, ...], *, key: bool = False) -> bool:
        wrong, hint = None, None
        if isinstance(value, str):
            wrong = "holds a NUL character, which no environment and no path can" if "\0" in value else None
        elif key and (value is None or isinstance(value, bool)):
            wrong, hint = "is no text to YAML", "quote it"
        elif isinstance(value, int) and not -_MOST <= value < _MOST:
            wrong = "is too large a number"
        elif isinstance(value, float) and not math.isfinite(value):
            wrong = f"must be a finite number, not {value}"
        elif not (value is None or isinstance(value, bool | int | float)):
            wrong = f"is a {type(value).__name__}, and a config holds text, numbers, lists and mappings"
        if wrong is not None:
            place = ".".join(path)
            self.problems.append(Problem(place, wrong, self.lines.get(place), hint))
        return wrong is None


def kind(value: Any) -> str:
    """Return what a value is, as a message says it: scalars in short, collections by their kind."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
