"""Functions that a script registers to be called at events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self


class CallbackEvent(StrEnum):
    """The events."""

    step = "step"
    """A step is done; called with its number."""
    saved = "saved"
    """A checkpoint is committed; called with its step and path, on rank 0."""
    end = "end"
    """The run ends, for whatever reason; called without arguments."""


class CallbackRegistry:
    """Callbacks by event. On exit, all callbacks of the end are called."""

    def __init__(self) -> None:
        self._callbacks: dict[CallbackEvent, list[tuple[int, Callable[..., object]]]] = defaultdict(list)

    def add_callback(self, event: CallbackEvent, function: Callable[..., object], priority: int) -> None:
        """Call `function` at `event`; higher priorities first, and those of equal priority in the order in which they were added."""
        self._callbacks[event].append((priority, function))
        self._callbacks[event].sort(key=lambda pair: -pair[0])

    def run_callbacks(self, event: CallbackEvent, *arguments: object) -> None:
        """Call the functions of `event`. Raises what one of them raises."""
        for _, function in self._callbacks[event]:
            function(*arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Call the functions of the end. Raises the first error that one of them raises, unless the run has failed already."""
        first_error: BaseException | None = None
        for _, function in self._callbacks[CallbackEvent.end]:
            try:
                function()
            except Exception as raised:  # noqa: BLE001  # the others must be called too
                first_error = first_error or raised
        if first_error and not error:
            raise first_error
