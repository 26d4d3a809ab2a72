"""Parse values that are read back from a Docker engine: labels, environment variables, and the contents of config objects.

Everyone who can create a service or a container can set them, and another version of swarmtrain may have written them. So these functions
accept any text: a malformed value counts as absent, and a malformed deployment is a StackError of its run. Neither affects other runs.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swarmtrain.errors import StackError

_MAX_SHOWN_CHARACTERS = 40


def parse_number(text: object, default: float = 0.0) -> float:
    """Return the finite number in `text`; `default` if it is absent or malformed."""
    try:
        number = float(text)  # type: ignore[arg-type]  # a TypeError is handled
    except (ValueError, TypeError, OverflowError):
        return default
    return number if math.isfinite(number) else default


def parse_count(text: object, default: int = 0) -> int:
    """Return the integer in `text`, if it is at least 0; `default` if it is absent or malformed."""
    number = parse_number(text, -1.0)
    return int(number) if number >= 0 and number.is_integer() else default


def parse_json(text: object) -> Any:
    """Return the JSON value in `text`; None if it is absent or malformed, for example nested too deeply."""
    try:
        return json.loads(text)  # type: ignore[arg-type]  # a TypeError is handled
    except (ValueError, TypeError, RecursionError):
        return None


def parse_mapping(text: object) -> dict[str, Any]:
    """Return the JSON object in `text`; empty if it is absent or malformed."""
    value = parse_json(text)
    return value if isinstance(value, dict) else {}


def parse_text_mapping(text: object) -> dict[str, str]:
    """Return the JSON object in `text` whose values are strings, without its other values; empty if it is absent or malformed."""
    return {key: value for key, value in parse_mapping(text).items() if isinstance(value, str)}


def parse_environment(settings: Sequence[str] | None) -> dict[str, str]:
    """Return the environment variables in `settings`, a list of NAME=VALUE."""
    return {name: value for name, _, value in (setting.partition("=") for setting in settings or ())}


def is_number(text: str) -> bool:
    """Return whether `text` is empty or a finite number."""
    return not text or math.isfinite(parse_number(text, math.inf))


def is_count(text: str) -> bool:
    """Return whether `text` is an integer of at least 1."""
    return parse_count(text) > 0


def is_mapping(text: str) -> bool:
    """Return whether `text` is empty or a JSON object."""
    return not text or isinstance(parse_json(text), dict)


def describe_malformed_labels(labels: Mapping[str, str], checks: Mapping[str, Callable[[str], bool]]) -> str:
    """Return which of `labels` are malformed by their check, with their values; empty if none is."""
    malformed = {name: labels[name] for name, is_valid in checks.items() if name in labels and not is_valid(labels[name])}
    return "; ".join(f"ignored its malformed label {name}: {value[:_MAX_SHOWN_CHARACTERS]!r}" for name, value in malformed.items())


@contextlib.contextmanager
def translate_malformed_deployment(run: str) -> Iterator[None]:
    """Convert any error about the form of a value in the body, which reads back what `run` was deployed with, to a StackError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        hint = f"another version of swarmtrain, or another program, has written it; swarmtrain down {run}, then deploy again"
        raise StackError(f"its deployment cannot be read: {reason}", place=f"run {run}", hint=hint) from None
