"""Data on stdout: a value as people read it, or as JSON."""

from __future__ import annotations

import json
from typing import Any, Protocol


class Shown(Protocol):
    """A value that prints itself, and that scripts can have as a dict."""

    def to_dict(self) -> dict[str, Any]: ...


def show(value: Shown, *, as_json: bool) -> None:
    """Print `value` on stdout."""
    show_json(value.to_dict()) if as_json else print(value)  # noqa: T201  # this is the place that prints


def show_json(value: dict[str, Any]) -> None:
    """Print a mapping as JSON on stdout."""
    print(json.dumps(value, indent=2, default=str))  # noqa: T201  # this is the place that prints
