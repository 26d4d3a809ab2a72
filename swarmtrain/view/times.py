"""Times and amounts as people write them, and as they type them."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from swarmtrain.errors import SwarmtrainError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGO = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_GIB = 2**30


def counted(number: Any, noun: str) -> str:
    """Return `3 nodes`, or `1 node`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a number of seconds as people write it: 42 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def ago(now: float, then: float) -> str:
    """Return `42 s ago`."""
    return f"{duration(now - then)} ago"


def clock(seconds: float) -> str:
    """Return a time since the epoch as this machine's clock shows it: 2026-11-21 22:34:16."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def gibibytes(used: float, limit: float) -> str:
    """Return `1.2/4.0 GiB`."""
    return f"{used / _GIB:.1f}/{limit / _GIB:.1f} GiB"


def point_in_time(text: str, now: float) -> float:
    """Return seconds since the epoch for `10m`, `1h30m`, `2d`, `now` less that long, or for a date and time. Raises SwarmtrainError."""
    if _AGO.fullmatch(text):
        return now - sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        hint = "--since 10m, --since 1h30m, or --since 2026-11-21T22:30:00; without a zone it is this machine's time"
        raise SwarmtrainError(f"`{text}` is neither a length of time nor a time", place="--since", hint=hint) from None
