"""Durations in the config: seconds, numbers with units as in `90m`, `1d12h` or `8 hours`, or as in Slurm `1-12:00:00`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(seconds?|minutes?|hours?|days?|[smhd])(?![a-z])\s*")
_CLOCK_PATTERN = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_MAX_SECONDS = 10 * 365 * 86400.0


def _parse_duration(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if clock := _CLOCK_PATTERN.fullmatch(value.strip()):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    text, seconds, position = value.strip().lower(), 0.0, 0
    while match := _PART_PATTERN.match(text, position):
        seconds += float(match[1]) * _UNIT_SECONDS[match[2][0]]
        position = match.end()
    if not text or position != len(text):
        raise ValueError("must be a number of seconds, or a duration such as 90m, 8h or 1d12h")
    return seconds


Duration = Annotated[float, BeforeValidator(_parse_duration, json_schema_input_type=float | str), Field(gt=0, le=_MAX_SECONDS)]
"""A duration in seconds, as a number or as text with units."""


def format_duration_text(seconds: float) -> str:
    """Return `seconds` in the notation of the config: 5400 as 1h30m."""
    rest, parts = round(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, _UNIT_SECONDS[unit])
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"
