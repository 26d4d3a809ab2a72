"""Progress bar on stderr: one line that is updated if stderr is a terminal, else a new line every 10 s."""

from __future__ import annotations

import sys
import time

_TERMINAL_INTERVAL_SECONDS, _LOG_INTERVAL_SECONDS = 0.5, 10.0


class ProgressBar:
    """Prints the completed part of `total`, the rate, and the estimated remaining time.

    `total` is in bytes, or in `total_unit`. `initial`: the part of `total` that was completed earlier. `count_unit`: unit of a second
    quantity, such as tokens, whose rate is shown too; empty if there is none. `verb`: first word of the progress line.
    """

    def __init__(self, count_unit: str, total: int, *, initial: int = 0, verb: str = "", total_unit: str = "") -> None:
        self._total_unit = f"M {total_unit}" if total_unit else "MB"
        self._count_unit, self._total, self._initial, self._done, self._verb = count_unit, total, initial, initial, verb
        self._count = 0
        self._start_time = self._last_printed = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def update(self, completed_size: int, completed_count: int) -> None:
        """Add `completed_size` to the completed part, and `completed_count` to the second quantity."""
        self._done += completed_size
        self._count += completed_count

    def print_if_due(self) -> None:
        """Print the progress if the print interval has passed since the last print."""
        now = time.monotonic()
        if now - self._last_printed >= (_TERMINAL_INTERVAL_SECONDS if self._is_terminal else _LOG_INTERVAL_SECONDS):
            self._last_printed = now
            sys.stderr.write(f"\r{self._format_line(now)}\033[K" if self._is_terminal else f"{self._format_line(now)}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Clear the progress line if stderr is a terminal."""
        if self._is_terminal:
            sys.stderr.write("\r\033[K")

    def _format_line(self, now: float) -> str:
        speed = (self._done - self._initial) / max(now - self._start_time, 1e-9)
        remaining = f"{_format_duration((self._total - self._done) / speed)} left" if speed else "no estimate yet"
        count_rate = f", {self._count / (now - self._start_time):,.0f} {self._count_unit}/s" if self._count_unit else ""
        done = f"{self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} {self._total_unit} ({self._done / max(self._total, 1):.0%})"
        return f"{self._verb} {done}, {speed / 1e6:,.1f} {self._total_unit}/s{count_rate}, {remaining}".strip()


def _format_duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
