"""How far it is, on stderr: one line that is rewritten on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

_OFTEN, _SELDOM = 0.5, 10.0


class Progress:
    """Tells how much is done of `total` bytes, or whatever `of` says, how fast, and how long it will take yet.

    `done` of them were there before.
    """

    def __init__(self, unit: str, total: int, *, done: int = 0, verb: str = "", of: str = "") -> None:
        self._of = f"M {of}" if of else "MB"
        self._unit, self._total, self._before, self._done, self._verb = unit, total, done, done, verb
        self._count = 0
        self._begun = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def add(self, size: int, count: int) -> None:
        """So many bytes more are done, and came to so many units."""
        self._done += size
        self._count += count

    def tell(self) -> None:
        """Tell, if it is time to."""
        now = time.monotonic()
        if now - self._last >= (_OFTEN if self._terminal else _SELDOM):
            self._last = now
            sys.stderr.write(f"\r{self._line(now)}\033[K" if self._terminal else f"{self._line(now)}\n")
            sys.stderr.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._terminal:
            sys.stderr.write("\r\033[K")

    def _line(self, now: float) -> str:
        speed = (self._done - self._before) / max(now - self._begun, 1e-9)
        left = f"{_duration((self._total - self._done) / speed)} left" if speed else "no estimate yet"
        counted = f", {self._count / (now - self._begun):,.0f} {self._unit}/s" if self._unit else ""
        done = f"{self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} {self._of} ({self._done / max(self._total, 1):.0%})"
        return f"{self._verb} {done}, {speed / 1e6:,.1f} {self._of}/s{counted}, {left}".strip()


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
