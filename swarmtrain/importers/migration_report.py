"""Migration report of an import: each key of the source file is either mapped into the config or reported as unmapped, with a reason.

A format's module fills a MigrationReport and builds its result; keys that the module did not handle are reported as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from swarmtrain.config import Config
from swarmtrain.config.loader import sort_and_limit_problems
from swarmtrain.config.validation_errors import convert_validation_error
from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.secret_values import redact_secrets

KeyPath = tuple[str, ...]
_ABSENT = object()
_MAX_VALUE_LENGTH = 40
_BATCH_KEYS = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
_SECRET_SUFFIXES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD")


class UnmappedReason(StrEnum):
    """Why a key of the source file was not mapped into the config."""

    unknown = "is not resolvable"
    no_counterpart = "has no counterpart"
    done_differently = "works differently"
    is_default = "matches the default"


@dataclass(frozen=True)
class UnmappedKey:
    """An unmapped key of the source file: the key, its line number (1-based), and what to use instead."""

    key: str
    line: int | None
    value: str
    reason: UnmappedReason
    replacement: str


@dataclass(frozen=True)
class ImportResult:
    """Result of an import: the config's values in schema order without defaults, the unmapped keys, and notes."""

    values: dict[str, Any]
    unmapped_keys: tuple[UnmappedKey, ...]
    notes: tuple[str, ...]
    used_keys: frozenset[KeyPath] = frozenset()
    """Keys of the source file that were handled."""


class MigrationReport:
    """Migration report: the values of a source file, and how each of its keys was handled."""

    def __init__(
        self, source_values: dict[str, Any], line_numbers: Mapping[str, int] | None = None, *, show_last_key_part_only: bool = False
    ) -> None:
        """Create the report of `source_values`; `line_numbers` maps each dotted key to its line number (1-based).

        `show_last_key_part_only`: show only the last part of each dotted key, because the line number identifies the key.
        """
        self._show_last_part_only = show_last_key_part_only
        self.source = _convert_keys_to_text(source_values)
        self._lines = dict(line_numbers or {})
        self._handled: set[KeyPath] = set()
        self._values: dict[KeyPath, Any] = {}
        self._origins: dict[KeyPath, KeyPath] = {}
        self._unmapped: list[UnmappedKey] = []
        self._unmapped_keys: list[KeyPath] = []
        self._notes: list[str] = []
        self.secrets: frozenset[str] = frozenset()
        """Values that are neither copied to the config nor shown."""

    def get_source_value(self, key: str | KeyPath, default: Any = None) -> Any:
        """Return the source file's value at `key`; `default` if the key is missing."""
        value: Any = self.source
        for key_part in _parse_key(key):
            if not isinstance(value, dict | list):
                return default
            try:
                value = value[int(key_part)] if isinstance(value, list) else value[key_part]
            except (LookupError, ValueError):
                return default
        return value

    def get_source_mapping(self, key: str | KeyPath) -> dict[str, Any]:
        """Return the source file's mapping at `key`; an empty mapping if the key is missing."""
        value = self.get_source_value(key)
        return value if isinstance(value, dict) else {}

    def get_source_list(self, key: str | KeyPath) -> list[Any]:
        """Return the source file's list at `key`; an empty list if the key is missing."""
        value = self.get_source_value(key)
        return value if isinstance(value, list) else []

    def has_source_key(self, key: str | KeyPath) -> bool:
        """Return whether the source file has a value at `key`; null counts as a value."""
        return self.get_source_value(key, _ABSENT) is not _ABSENT

    def rename_source_key(self, section: KeyPath, old_name: str, new_name: str) -> None:
        """In the source's values, rename the outdated key `old_name` of `section` to its current name `new_name`."""
        mapping, old_path = self.get_source_value(section) if section else self.source, ".".join((*section, old_name))
        if isinstance(mapping, dict) and old_name in mapping and new_name not in mapping:
            mapping[new_name] = mapping.pop(old_name)
            new_path = ".".join((*section, new_name))
            self._lines |= {
                new_path + path.removeprefix(old_path): line for path, line in self._lines.items() if f"{path}.".startswith(f"{old_path}.")
            }

    def iterate_source_leaves(self, key: str | KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
        """Yield each leaf at and below `key`, with its key.

        A leaf is an empty value, or a value that is neither a mapping nor a list of mappings.
        """
        yield from _iterate_leaves(_parse_key(key), self.get_source_value(key, {}) if key else self.source)

    def map_key(self, key: str | KeyPath, field_path: str | KeyPath, value: Any = _ABSENT) -> None:
        """Set the config field `field_path` to the source's value at `key`, and mark the key as handled.

        If `value` is passed, the field is set to it instead: a value that was derived from the source's value.
        """
        source_key, config_key = _parse_key(key), _parse_key(field_path)
        config_value = self.get_source_value(source_key) if value is _ABSENT else value
        previous_key = self._origins.get(config_key)
        if (
            previous_key not in (None, source_key)
            and not isinstance(config_value, list | dict)
            and self._values.get(config_key) != config_value
        ):
            self.add_unmapped_key(previous_key, UnmappedReason.done_differently, f"overridden by {'.'.join(source_key)}")
        self._handled.add(source_key)
        self._origins[config_key], self._values[config_key] = source_key, config_value

    def set_config_value(self, field_path: str | KeyPath, value: Any) -> None:
        """Set the config field `field_path` to a value that the source implies without a key for it."""
        self._values[_parse_key(field_path)] = value

    def remove_config_value(self, field_path: str | KeyPath) -> None:
        """Remove the value of the config field `field_path`."""
        self._values.pop(_parse_key(field_path), None)
        self._origins.pop(_parse_key(field_path), None)

    def get_config_value(self, field_path: str | KeyPath) -> Any:
        """Return the value set so far for the config field `field_path`; None if the field is not set."""
        return self._values.get(_parse_key(field_path))

    def add_unmapped_key(self, key: str | KeyPath, reason: UnmappedReason, replacement: str = "", *, value: Any = _ABSENT) -> None:
        """Report `key` as unmapped. `replacement`: what to use instead, or why there is no replacement.

        `value`: value to show in the report, if not the source's value at `key`.
        """
        source_key = _parse_key(key)
        self._handled.add(source_key)
        shown_value = self.get_source_value(source_key) if value is _ABSENT else value
        self._unmapped_keys.append(source_key)
        text = "…" if is_secret_name(source_key[-1]) else _abbreviate_value(shown_value, self.secrets)
        self._unmapped.append(
            UnmappedKey(
                source_key[-1].rstrip("'") if self._show_last_part_only else ".".join(source_key),
                self.find_line_number(source_key),
                text,
                reason,
                replacement,
            )
        )

    def mark_keys_handled(self, *keys: str | KeyPath) -> None:
        """Mark `keys` of the source as handled, because their values were used in the mapping of other keys."""
        self._handled.update(_parse_key(key) for key in keys)

    def add_note(self, text: str) -> None:
        """Add a note about the config, once."""
        text = redact_secrets(text, self.secrets) if self.secrets else text
        if text not in self._notes:
            self._notes.append(text)

    def is_key_handled(self, key: KeyPath) -> bool:
        """Return whether `key` of the source has been handled so far."""
        return key in self._handled

    def find_line_number(self, key: KeyPath) -> int | None:
        """Return the line number of `key` in the source; if it is unknown, that of the innermost enclosing key with a known line."""
        while key and ".".join(key) not in self._lines:
            key = key[:-1]
        return self._lines.get(".".join(key))

    def set_runner_type(self, runner_type: str, key: str | KeyPath = ()) -> None:
        """Set the config's runner type to `runner_type`. `key` is the source key that specifies it; (): none."""
        if key:
            self.map_key(key, "runner.runner_type", runner_type)
        else:
            self.set_config_value("runner.runner_type", runner_type)

    def add_gpu_visibility_setting(self) -> None:
        """Add the setting that makes the machine's GPUs visible in containers, if the launcher needs it."""
        if self.get_config_value("runner.runner_type") in (None, "swarm") and self.get_config_value("runner.swarm.gpu") is None:
            self.set_config_value("runner.swarm.gpu", "visible")

    def build_import_result(self, source_file: str) -> ImportResult:
        """Return the import result. Raises ConfigError, with line numbers of `source_file`, if the config is invalid."""
        for key in self._list_unhandled_keys():
            self.add_unmapped_key(key, UnmappedReason.no_counterpart, "unknown to swarmtrain")
        self._fill_batch_sizes()
        config = self._validate_config(source_file)
        config_values = config.model_dump(mode="json")
        non_default = {
            path: value for path, value in self._values.items() if not _is_default_value(path, config_values, _get_config_default_values())
        }
        non_default = {path: value for path, value in non_default.items() if value is not None or path[0] != "topology"}
        if any(path[0] == "topology" for path in non_default):
            non_default |= {
                path: value
                for path, value in self._values.items()
                if path[0] == "topology" and path[-1] in _BATCH_KEYS and value is not None
            }
        used_keys = {self._origins[path] for path in non_default if path in self._origins}
        reported_keys = set(self._unmapped_keys)
        for path, key in self._origins.items():
            if path not in non_default and key not in used_keys | reported_keys:
                self.add_unmapped_key(key, UnmappedReason.is_default, ".".join(path), value=self.get_source_value(key, self._values[path]))
        reason_order = list(UnmappedReason)
        unmapped = sorted(self._unmapped, key=lambda one: (reason_order.index(one.reason), one.line or 0))
        return ImportResult(
            _sort_values_by_schema(_build_nested_dict(non_default), Config), tuple(unmapped), tuple(self._notes), frozenset(self._handled)
        )

    def _fill_batch_sizes(self) -> None:
        """Fill in missing batch sizes from the known ones or the defaults, and add a note."""
        topology = {path[1]: value for path, value in self._values.items() if path[0] == "topology" and value is not None}
        if not topology or sum(name in topology for name in _BATCH_KEYS) > 1:
            return
        default_topology = Config().topology
        for name in _BATCH_KEYS[:2]:
            if name not in topology:
                known_size = topology.get("micro_batch_size") or topology.get("global_batch_size")
                self.set_config_value(f"topology.{name}", known_size or getattr(default_topology, name))
        self.add_note(
            "the source does not give both topology.global_batch_size and micro_batch_size: these values are guesses, so set them"
        )

    def _validate_config(self, source_file: str) -> Config:
        try:
            return Config.model_validate_json(json.dumps(_build_nested_dict(self._values)))
        except ValidationError as error:
            problems = [self._locate_problem(problem) for problem in convert_validation_error(error, Config, {})]
            raise ConfigError(sort_and_limit_problems(problems), source=source_file) from None

    def _locate_problem(self, problem: Problem) -> Problem:
        path = tuple(problem.path.split(".")) if problem.path else ()
        near = [at for at in self._origins if at[: len(path)] == path or path[: len(at)] == at]
        if not near:
            return problem
        key = self._origins[max(near, key=lambda at: len([None for one, other in zip(at, path, strict=False) if one == other]))]
        return Problem(f"{'.'.join(key)} (imported as {problem.path})", problem.message, self.find_line_number(key), problem.hint)

    def _list_unhandled_keys(self) -> list[KeyPath]:
        """Return the outermost keys of the source that were not handled and have no handled key above or below them."""
        unhandled: list[KeyPath] = []
        prefixes = {handled_key[:length] for handled_key in self._handled for length in range(len(handled_key))}

        def collect_unhandled_keys(key: KeyPath, value: Any) -> None:
            if key in self._handled:
                return
            if key and key not in prefixes:
                unhandled.append(key)
            elif isinstance(value, dict | list):
                for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                    collect_unhandled_keys((*key, str(name)), item)

        collect_unhandled_keys((), self.source)
        return unhandled


@cache
def is_config_field(field_path: str | KeyPath) -> bool:
    """Return whether the config has a field (not a section) at `field_path`."""
    model: Any = Config
    key_parts = _parse_key(field_path)
    for depth, key_part in enumerate(key_parts):
        if key_part not in model.model_fields:
            return False
        section_type = next(
            (field_type for field_type in _get_union_members(model.model_fields[key_part].annotation) if _is_section(field_type)), None
        )
        if section_type is None:
            return depth == len(key_parts) - 1
        model = section_type
    return False


def get_field_types(field_path: str | KeyPath) -> tuple[Any, ...]:
    """Return the possible types of the field at `field_path`."""
    model: Any = Config
    *sections, name = _parse_key(field_path)
    for key_part in sections:
        model = next(field_type for field_type in _get_union_members(model.model_fields[key_part].annotation) if _is_section(field_type))
    return _get_union_members(model.model_fields[name].annotation)


def is_secret_name(name: str) -> bool:
    """Return whether a variable or field probably contains a secret, because its name ends in KEY, TOKEN, PASSWORD or similar."""
    return name.upper().endswith(_SECRET_SUFFIXES)


def _convert_keys_to_text(value: Any) -> Any:
    """Return `value` with all mapping keys converted to text, as other tools expect: YAML also allows numbers and null as keys."""
    if isinstance(value, dict):
        return {str(key): _convert_keys_to_text(item) for key, item in value.items()}
    return [_convert_keys_to_text(item) for item in value] if isinstance(value, list) else value


def _parse_key(key: str | KeyPath) -> KeyPath:
    return tuple(key.split(".")) if isinstance(key, str) else key


def _iterate_leaves(key: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _iterate_leaves((*key, str(name)), item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _iterate_leaves((*key, str(index)), item)
    else:
        yield key, value


def _get_union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the member types of `annotation` if it is an optional type, else a tuple of `annotation` alone."""
    inner = get_args(annotation)
    return inner if type(None) in inner else (annotation,)


def _is_section(field_type: Any) -> bool:
    return isinstance(field_type, type) and issubclass(field_type, BaseModel)


@cache
def _get_config_default_values() -> dict[str, Any]:
    return Config().model_dump(mode="json")


def _is_default_value(field_path: KeyPath, actual_value: Any, default_value: Any) -> bool:
    for key_part in field_path:
        if (
            not isinstance(actual_value, dict)
            or not isinstance(default_value, dict)
            or key_part not in actual_value
            or key_part not in default_value
        ):
            return False
        actual_value, default_value = actual_value[key_part], default_value[key_part]
    return bool(actual_value == default_value)


def _build_nested_dict(values_by_path: Mapping[KeyPath, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (*sections, name), value in values_by_path.items():
        target = nested
        for section in sections:
            if not isinstance(target.get(section), dict):
                target[section] = {}
            target = target[section]
        target[name] = value
    return nested


def _sort_values_by_schema(config_values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    ordered = {}
    for name, field in model.model_fields.items():
        if name in config_values:
            section = next((field_type for field_type in _get_union_members(field.annotation) if _is_section(field_type)), None)
            ordered[name] = (
                _sort_values_by_schema(config_values[name], section)
                if section and isinstance(config_values[name], dict)
                else config_values[name]
            )
    return ordered


def _abbreviate_value(value: Any, secrets: frozenset[str]) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = redact_secrets(text[: 9 * _MAX_VALUE_LENGTH], secrets)
    printable = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return printable if len(printable) <= _MAX_VALUE_LENGTH else f"{printable[: _MAX_VALUE_LENGTH - 1]}…"
