"""Intervals in the config: a number of steps, `auto`, or a count and a unit, as in `10 minutes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

AUTO = "auto"
_UNITS = {"steps": 1, "epochs": 1, "minutes": 60, "hours": 3600}
_INTERVAL_PATTERN = re.compile(r"(\d{1,9}) +(steps|epochs|minutes|hours|step|epoch|minute|hour)")


@dataclass(frozen=True)
class Interval:
    """A parsed interval of the config: in steps, epochs or seconds. At most one field is not None."""

    steps: int | None = None
    epochs: int | None = None
    seconds: int | None = None


def parse_interval(value: int | str | None) -> Interval:
    """Return the interval that the config value `value` denotes. For None and `auto`, all fields of the interval are None."""
    if isinstance(value, int):
        return Interval(steps=value)
    match = _INTERVAL_PATTERN.fullmatch(value or "")
    if match is None:
        return Interval()
    unit = match[2].removesuffix("s") + "s"
    count = int(match[1]) * _UNITS[unit]
    return Interval(**{unit if unit in ("steps", "epochs") else "seconds": count})


def _check_interval(value: Any) -> Any:
    if value is None or value == AUTO:
        return value
    count = (
        value if type(value) is int else int(match[1]) if isinstance(value, str) and (match := _INTERVAL_PATTERN.fullmatch(value)) else 0
    )
    if count < 1:
        raise ValueError("must be a number of steps, auto, or an interval such as `10 minutes`, `2 hours`, `1 epoch`")
    return value


IntervalText = Annotated[int | str | None, BeforeValidator(_check_interval)]
"""An interval as written in the config."""
