"""Read a YAML file and `-o key.path=value` overrides into a Config, and report all errors at once.

Each error has its key path and its line in the file; for an unknown key, also the most similar known key.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.config.overrides import apply_overrides
from swarmtrain.config.schema.section import Section
from swarmtrain.config.user_files import UnreadableFileError, read_file_with_limit
from swarmtrain.config.validation_errors import convert_validation_error
from swarmtrain.config.yaml_document import YamlSyntaxError, describe_value, read_yaml
from swarmtrain.errors import ConfigError, Problem, SwarmtrainError

SectionT = TypeVar("SectionT", bound=Section)
STDIN_PATH = Path("-")
"""Path that stands for standard input."""
_MAX_BYTES = 1_000_000
_MISSING_CONFIG_HINT = "swarmtrain init {} creates one"
_MAX_PROBLEMS = 50
_MAX_MESSAGE_LENGTH, _MAX_KEY_LENGTH = 400, 80


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in the YAML file at `path`, or on standard input for `-`, changed by `overrides` (each `key.path=value`).

    Raises ConfigError with all problems, or SwarmtrainError if the file cannot be read.
    """
    return parse_config(read_config_text(Path(path)), overrides, source=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, source: str | None = None) -> Config:
    """Return the config that the YAML text `text` describes, changed by `overrides`. Raises ConfigError with all problems of the config."""
    return parse_section(text, Config, overrides, source=source)


def parse_section(text: str, section_class: type[SectionT], overrides: Sequence[str] = (), *, source: str | None = None) -> SectionT:
    """Return the section of class `section_class` that the YAML text `text` describes, changed by `overrides`.

    Raises ConfigError with all problems.
    """
    try:
        document = read_yaml(text)
    except YamlSyntaxError as error:
        raise ConfigError(
            sort_and_limit_problems([Problem("", f"is not valid YAML: {error}", error.line, error.hint)]), source=source
        ) from None
    values = document.values
    if not isinstance(values, dict):
        raise ConfigError(sort_and_limit_problems([_build_root_type_problem(values, section_class, source)]), source=source)
    overridden, problems = apply_overrides(values, overrides)
    problems = [*document.problems, *problems]
    try:
        section = section_class.model_validate_json(json.dumps(values))
    except ValidationError as error:
        reported_paths = {problem.path for problem in problems}
        converted = convert_validation_error(error, section_class, document.lines, overridden)
        problems += [problem for problem in converted if problem.path not in reported_paths]
    except ValueError as error:
        problems.append(Problem("", f"contains an invalid value: {error}"))
    if problems:
        raise ConfigError(sort_and_limit_problems(problems), source=source)
    return section


def read_config_text(path: Path, missing_hint: str = _MISSING_CONFIG_HINT) -> str:
    """Return the text of the YAML file at `path`, or of standard input for `-`. Raises SwarmtrainError if it cannot be read.

    `missing_hint`: what to do if there is no such file; {} stands for the path.
    """
    try:
        content = sys.stdin.buffer.read(_MAX_BYTES) if path == STDIN_PATH else read_file_with_limit(path, _MAX_BYTES)
    except UnreadableFileError as error:
        hints = {errno.ENOENT: missing_hint, errno.EACCES: "ls -l {} shows its permissions"}
        raise SwarmtrainError(str(error), place=str(path), hint=hints.get(error.errno, "pass a YAML config file").format(path)) from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        is_utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = f"iconv -f UTF-16 -t UTF-8 {path}" if is_utf16 else "check that this is the right file"
        raise SwarmtrainError("is UTF-16; a config must be UTF-8" if is_utf16 else "is not text", place=str(path), hint=hint)
    return text


def _build_root_type_problem(root_value: Any, section_class: type[Section], source: str | None) -> Problem:
    if root_value is None and section_class is not Config:
        return Problem("", "is empty", hint="{} alone uses all defaults")
    if root_value is None:
        name = source or "config.yml"
        return Problem("", "is empty", hint=f"swarmtrain init {name} --force writes a config to start from; {{}} alone uses all defaults")
    names = " and ".join(list(section_class.model_fields)[:2]) if section_class is not Config else "runner and trainer"
    return Problem("", f"must be a mapping of keys such as {names}, not {describe_value(root_value)}", 1)


def sort_and_limit_problems(problems: list[Problem]) -> tuple[Problem, ...]:
    """Return `problems` sorted by line, escaped for a terminal, and limited in number."""
    escaped = (
        replace(
            problem,
            path=escape_text(problem.path, _MAX_KEY_LENGTH),
            message=escape_text(problem.message),
            hint=problem.hint and escape_text(problem.hint),
        )
        for problem in problems
    )
    ordered = sorted(escaped, key=lambda problem: problem.line or 10**9)
    omitted_count = len(ordered) - _MAX_PROBLEMS
    return (*ordered[:_MAX_PROBLEMS], *([Problem("", f"and {omitted_count} more problems")] if omitted_count > 0 else ()))


def escape_text(text: str, max_length: int = _MAX_MESSAGE_LENGTH) -> str:
    """Return `text` for display on a terminal: control characters escaped, truncated to `max_length` characters."""
    printable = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:max_length])
    return printable if len(text) <= max_length else f"{printable}…"
