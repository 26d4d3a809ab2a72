"""Format times and amounts as text, and parse times that the user types."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from swarmtrain.errors import SwarmtrainError

_DURATION_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PATTERN = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
# Terminal sequences of ECMA-48: CSI (colours, cursor), OSC (title, clipboard, links), DCS and its like, and two-character escapes.
_ESCAPE_SEQUENCE_PATTERN = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\\\|\x9c)?|\x1b[ -/]*[0-~]"
)
# C0 and C1 controls except tab and line feed, and the marks that reverse the direction of text.
_CONTROL_PATTERN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONG_SECONDS = 12 * 3600.0
_GIB = 2**30


def remove_control_characters(text: str) -> str:
    """Return `text` without the escape sequences and control characters with which a program could control the user's terminal.

    Of a progress bar, which overwrites its line with carriage returns, the last version is kept. Other control characters except line
    feeds and tabs are shown as escapes, such as `\\x07`.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in _ESCAPE_SEQUENCE_PATTERN.sub("", text).split("\n")]
    return _CONTROL_PATTERN.sub(lambda match: match[0].encode("unicode_escape").decode(), "\n".join(lines))


def format_loss(loss: object) -> str:
    """Return `loss` as text; "NaN/Inf" if it is not a finite number, which events contain as null."""
    return f"{loss:.4f}" if isinstance(loss, int | float) and math.isfinite(loss) else "NaN/Inf"


def format_count(number: Any, noun: str) -> str:
    """Return `number` and `noun` as text, with the noun in the singular or plural: `1 node`, `3 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Return a number of seconds in human-readable form: 42 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 2 * 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def format_age(now: float, past_time: float) -> str:
    """Return the age of `past_time` at `now` as text: `42 s ago`."""
    return f"{format_duration(now - past_time)} ago"


def format_time(seconds: float) -> str:
    """Return `seconds` since the epoch as text in this machine's time zone: 2026-11-21 22:34:16."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def format_clock_time(seconds: float) -> str:
    """Return the time of day of `seconds` since the epoch as text in this machine's time zone: 22:34:16."""
    return format_time(seconds)[11:]


def format_end_time(end: float, now: float) -> str:
    """Return the time `end`, in seconds since the epoch, as text: 22:34, with the date if it is more than 12 h after `now`."""
    text = format_time(end)[:16]
    return text if end - now > _LONG_SECONDS else text[11:]


def format_memory_usage(used_bytes: float, limit_bytes: float) -> str:
    """Return memory usage and limit, both in bytes, as text: `1.2/4.0 GiB`."""
    return f"{used_bytes / _GIB:.1f}/{limit_bytes / _GIB:.1f} GiB"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return `rows`, the first of which is the header, as lines of text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows)


def parse_time(text: str, now: float) -> float:
    """Parse `text`, a duration before `now` (`10m`, `1h30m`, `2d`) or an ISO 8601 date and time, into seconds since the epoch.

    Raises SwarmtrainError if `text` is neither.
    """
    if _DURATION_PATTERN.fullmatch(text):
        return now - sum(float(number) * _DURATION_UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        hint = "use --since 10m, --since 1h30m, or --since 2026-11-21T22:30:00; a time without a zone is this machine's local time"
        raise SwarmtrainError(f"`{text}` is neither a duration nor a point in time", place="--since", hint=hint) from None
