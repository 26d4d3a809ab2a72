"""Parse YAML into JSON-compatible values, with the line of every key path and all errors in the YAML text.

For any input, the result can be written as JSON and validated quickly: the nesting depth is limited, aliases cannot expand a few values to
millions, and each alias gets a separate copy of the value that it refers to.
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

_MAX_DEPTH = 50
_MAX_VALUES = 100_000
_INTEGER_LIMIT = 1 << 63
_TEXT_KEYS = {("runner", "env"), ("runner", "script_args")}
"""Keys whose items are text: a number there is read as it is written, since 1.10 and 010 are not 1.1 and 8 for a program."""
_NUMBER_TAGS, _TEXT_TAG = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}, "tag:yaml.org,2002:str"
_FLOAT_PATTERN = (
    r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# Error messages of libyaml, and their usual cause.
_HINTS = (
    ("cannot start any token", "indent with spaces, not tabs, and quote a value that begins with @ ` or %"),
    ("mapping values are not allowed", "quote a value that contains a colon and a space"),
    ("undefined alias", "quote a value that begins with *"),
    ("scanning an alias", "quote a value that begins with *"),
    ("constructor for the tag", "quote a value that begins with !"),
    ("another document", "a config is one document: remove the line ---"),
)


T = TypeVar("T")


class YamlSyntaxError(Exception):
    """Raised if the text is not valid YAML, so that nothing can be parsed. `line` is 1-based."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        self.hint = next((hint for words, hint in _HINTS if words in reason), None)


class _YamlLoader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]  # chosen at run time
    """YAML 1.1 loader with two deviations: 1e-4 is a number, and a date is text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
            raise yaml.constructor.ConstructorError(
                None, None, f"{describe_value(node.value)} is not of type {node.tag.rpartition(':')[2]}", node.start_mark
            ) from None


_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT_PATTERN), list("-+0123456789."))


@dataclass
class YamlDocument:
    """Result of parsing a YAML text: its values (None if empty), the line of each key path, and the errors of single keys or values."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str, parent_path: tuple[str, ...] = ()) -> YamlDocument:
    """Return the parsed document of the YAML text `text`, which is the value at `parent_path` of a config, by default a whole config.

    Raises YamlSyntaxError if it is not valid YAML.
    """
    try:
        _call_with_yaml_loader(text, _check_nesting_depth)
        node = _call_with_yaml_loader(text, lambda loader: loader.get_single_node())
        if node is None:
            return YamlDocument()
        reader = _DocumentReader()
        reader.record_key_lines(node, ())
        _mark_numbers_as_text(node, parent_path)
        values = _call_with_yaml_loader("", lambda loader: loader.construct_document(node))
        return YamlDocument(reader.to_json_values(values, ()), reader.lines, reader.problems)
    except yaml.reader.ReaderError as error:
        line = 1 + text.encode(errors="replace")[: error.position].count(b"\n")
        raise YamlSyntaxError(f"{error.reason} (character {error.character!r})", line) from None
    except yaml.MarkedYAMLError as error:
        raise YamlSyntaxError(_describe_yaml_error(error), error.problem_mark.line + 1 if error.problem_mark else None) from None
    except UnicodeEncodeError:
        raise YamlSyntaxError("it contains an unpaired surrogate") from None


def _call_with_yaml_loader(text: str, function: Callable[[Any], T]) -> T:
    loader = _YamlLoader(text)
    try:
        return function(loader)
    finally:
        loader.dispose()


def _mark_numbers_as_text(yaml_node: yaml.Node, key_path: tuple[str, ...]) -> None:
    if isinstance(yaml_node, yaml.MappingNode):
        for key, value in yaml_node.value:
            _mark_numbers_as_text(value, (*key_path, str(key.value)))
    elif isinstance(yaml_node, yaml.SequenceNode):
        for index, value in enumerate(yaml_node.value):
            _mark_numbers_as_text(value, (*key_path, str(index)))
    elif key_path[:-1] in _TEXT_KEYS and yaml_node.tag in _NUMBER_TAGS:
        yaml_node.tag = _TEXT_TAG


def _check_nesting_depth(loader: Any) -> None:
    """Raise YamlSyntaxError if the YAML is nested too deeply: the recursion would crash the C parser."""
    depth = 0
    while loader.check_event():
        event = loader.get_event()
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise YamlSyntaxError("nested too deeply", event.start_mark.line + 1)


def _describe_yaml_error(error: yaml.MarkedYAMLError) -> str:
    if error.context and error.context.startswith("while"):
        start_line = (
            error.context_mark.line + 1
            if error.context_mark and error.problem_mark and error.context_mark.line != error.problem_mark.line
            else 0
        )
        return f"{error.problem} {error.context}{f' that begins in line {start_line}' if start_line else ''}"
    return ", ".join(part for part in (error.context, error.problem) if part)


class _DocumentReader:
    """Converter of the YAML nodes of one document to values, which collects lines and problems."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._node_count = 0

    def record_key_lines(self, yaml_node: yaml.Node, parent_path: tuple[str, ...]) -> None:
        """Record the line of each key path below `yaml_node`, and report duplicate keys, of which PyYAML would silently keep the last."""
        self._node_count += 1
        if len(parent_path) > _MAX_DEPTH:
            raise YamlSyntaxError("nested too deeply", yaml_node.start_mark.line + 1)
        if self._node_count > _MAX_VALUES:
            raise YamlSyntaxError("it has too many values, possibly because of aliases", yaml_node.start_mark.line + 1)
        if isinstance(yaml_node, yaml.MappingNode):
            seen_keys: set[str] = set()
            for key, value in yaml_node.value:
                name = str(key.value)
                key_path, line = (*parent_path, name), key.start_mark.line + 1
                if name in seen_keys:
                    self.problems.append(Problem(".".join(key_path), "appears twice", line, "keep one of the two"))
                seen_keys.add(name)
                self.lines[".".join(key_path)] = line
                self.record_key_lines(value, key_path)
        elif isinstance(yaml_node, yaml.SequenceNode):
            for index, value in enumerate(yaml_node.value):
                key_path = (*parent_path, str(index))
                self.lines[".".join(key_path)] = value.start_mark.line + 1
                self.record_key_lines(value, key_path)

    def to_json_values(self, value: Any, key_path: tuple[str, ...]) -> Any:
        """Return a copy of `value` that JSON can represent. Values that JSON cannot represent are omitted and reported as problems."""
        if isinstance(value, dict):
            valid_items = {key: item for key, item in value.items() if self._check_json_value(key, (*key_path, str(key)), is_key=True)}
            return {key: self.to_json_values(item, (*key_path, str(key))) for key, item in valid_items.items()}
        if isinstance(value, list):
            return [self.to_json_values(item, (*key_path, str(index))) for index, item in enumerate(value)]
        return value if self._check_json_value(value, key_path) else None

    def _check_json_value(self, value: Any, key_path: tuple[str, ...], *, is_key: bool = False) -> bool:
        reason, hint = None, None
        if isinstance(value, str):
            reason = "contains a NUL character, which environment variables and paths cannot contain" if "\0" in value else None
        elif is_key and (value is None or isinstance(value, bool)):
            reason, hint = "is null or a boolean in YAML, but a key must be a string", "quote it"
        elif isinstance(value, int) and not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
            reason = "is too large a number"
        elif isinstance(value, float) and not math.isfinite(value):
            reason = f"must be a finite number, not {value}"
        elif not (value is None or isinstance(value, bool | int | float)):
            reason = f"is a {type(value).__name__}, but a config contains only text, numbers, lists and mappings"
        if reason is not None:
            dotted_path = ".".join(key_path)
            self.problems.append(Problem(dotted_path, reason, self.lines.get(dotted_path), hint))
        return reason is None


def describe_value(value: Any) -> str:
    """Return a short description of `value` for error messages: scalars abbreviated, collections by their type."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
