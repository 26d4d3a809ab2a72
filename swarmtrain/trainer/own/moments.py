"""Functions that a script wants to be called when something happens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self


class Moment(StrEnum):
    """What can happen."""

    step = "step"
    """A step has been made; called with its number."""
    saved = "saved"
    """A checkpoint has come to stand; called with its step and path, on rank 0."""
    end = "end"
    """The run ends, however it does; called with nothing."""


class Moments:
    """What is to be called, and when. At its exit what is for the end is called, all of it."""

    def __init__(self) -> None:
        self._functions: dict[Moment, list[tuple[int, Callable[..., object]]]] = defaultdict(list)

    def add(self, moment: Moment, function: Callable[..., object], priority: int) -> None:
        """Call `function` at `moment`; a higher priority first, of the same the one that was added first."""
        self._functions[moment].append((priority, function))
        self._functions[moment].sort(key=lambda pair: -pair[0])

    def call(self, moment: Moment, *arguments: object) -> None:
        """Call what is for `moment`. Raises what one of them raises."""
        for _, function in self._functions[moment]:
            function(*arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Call what is for the end. Raises the first that one of them raises, unless the run has failed already."""
        failed: BaseException | None = None
        for _, function in self._functions[Moment.end]:
            try:
                function()
            except Exception as raised:  # noqa: BLE001  # the others are to be called too
                failed = failed or raised
        if failed and not error:
            raise failed
