"""Durations in the config: seconds, or numbers with units."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from swarmtrain.config.schema.fields.duration import Duration, format_duration_text

_ADAPTER: TypeAdapter[float] = TypeAdapter(Duration)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90),
        ("90", None),
        ("90s", 90),
        ("1d12h", 129600),
        ("8 hours", 28800),
        ("1.5h", 5400),
        ("2 days 1 minute", 172860),
        (0.5, 0.5),
        ("1-12:00:00", 129600),
        ("12:30:05", 45005),
    ],
)
def test_a_duration_is_seconds(value: float | str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValidationError, match="must be a number of seconds, or a duration such as 90m, 8h or 1d12h"):
            _ADAPTER.validate_python(value)
    else:
        assert _ADAPTER.validate_python(value) == seconds


@pytest.mark.parametrize("value", ["", "h", "5 parsecs", "1h-2m", "1hm", "-3h", "1e3s", 0, -1, "0s", "9999999d", "12:30", "1-12", "1:2:3"])
def test_other_values_are_refused(value: float | str) -> None:
    with pytest.raises(ValidationError):
        _ADAPTER.validate_python(value)


@pytest.mark.parametrize(("seconds", "text"), [(5400, "1h30m"), (86400, "1d"), (61, "1m1s"), (0.2, "0s"), (1000, "16m40s")])
def test_durations_are_printed_as_they_are_written(seconds: float, text: str) -> None:
    assert format_duration_text(seconds) == text
