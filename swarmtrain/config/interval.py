"""How often something is to be done: a number of steps, `auto`, or a count and its unit, as in `10 minutes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

AUTO = "auto"
_UNITS = {"steps": 1, "epochs": 1, "minutes": 60, "hours": 3600}
_TEXT = re.compile(r"(\d{1,9}) +(steps|epochs|minutes|hours|step|epoch|minute|hour)")


@dataclass(frozen=True)
class Interval:
    """An interval that is read; what is None does not count here."""

    steps: int | None = None
    epochs: int | None = None
    seconds: int | None = None


def read(value: int | str | None) -> Interval:
    """Return the interval that `value` means; one without anything for None and for `auto`."""
    if isinstance(value, int):
        return Interval(steps=value)
    found = _TEXT.fullmatch(value or "")
    if found is None:
        return Interval()
    unit = found[2].removesuffix("s") + "s"
    count = int(found[1]) * _UNITS[unit]
    return Interval(**{unit if unit in ("steps", "epochs") else "seconds": count})


def _known(value: Any) -> Any:
    if value is None or value == AUTO:
        return value
    number = value if type(value) is int else int(found[1]) if isinstance(value, str) and (found := _TEXT.fullmatch(value)) else 0
    if number < 1:
        raise ValueError("must be a number of steps, auto, or as `10 minutes`, `2 hours`, `1 epoch`")
    return value


IntervalText = Annotated[int | str | None, BeforeValidator(_known)]
"""As it stands in the config."""
