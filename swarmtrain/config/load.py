"""Read a YAML file and `-o key.path=value` overrides into a Config, and report everything that is wrong at once.

Each problem names its key path, its line in the file, and for an unknown key the nearest known one.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.config.explain import explain
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
        raise ConfigError(order_problems([Problem("", f"is not YAML: {error}", error.line, error.hint)]), source=source) from None
    values = found.values
    if not isinstance(values, dict):
        raise ConfigError(order_problems([_no_mapping(values, source)]), source=source)
    overridden, problems = override(values, overrides)
    problems = [*found.problems, *problems]
    try:
        config = Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        known = {problem.path for problem in problems}
        problems += [problem for problem in explain(error, Config, found.lines, overridden) if problem.path not in known]
    except ValueError as error:
        problems.append(Problem("", f"holds a value that a config cannot hold: {error}"))
    if problems:
        raise ConfigError(order_problems(problems), source=source)
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


def order_problems(problems: list[Problem]) -> tuple[Problem, ...]:
    """Sort by line, fit for a terminal; of a file that is wrong all over, the first problems say enough."""
    shown = (
        replace(
            problem,
            path=escape_text(problem.path, _LONGEST_KEY),
            message=escape_text(problem.message),
            hint=problem.hint and escape_text(problem.hint),
        )
        for problem in problems
    )
    found = sorted(shown, key=lambda problem: problem.line or 10**9)
    more = len(found) - _MOST_PROBLEMS
    return (*found[:_MOST_PROBLEMS], *([Problem("", f"and {more} more problems like these")] if more > 0 else ()))


def escape_text(text: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Return `text` fit for a terminal: in one piece of bearable length, control characters written out."""
    plain = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:longest])
    return plain if len(text) <= longest else f"{plain}…"
