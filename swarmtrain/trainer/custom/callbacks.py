"""Callbacks: functions that a script registers to be called at events of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self


class CallbackEvent(StrEnum):
    """Events of a run at which callbacks are called."""

    step = "step"
    """A step has ended. The callback receives the step."""
    saved = "saved"
    """A checkpoint is committed. The callback is called on rank 0, with the step and the path of the checkpoint."""
    end = "end"
    """The run ends, normally or with an error. The callback receives no arguments."""


class CallbackRegistry:
    """Callbacks of a run, by event. As a context manager, it calls the callbacks of the event `end` when it exits."""

    def __init__(self) -> None:
        self._callbacks: dict[CallbackEvent, list[tuple[int, Callable[..., object]]]] = defaultdict(list)

    def add_callback(self, event: CallbackEvent, function: Callable[..., object], priority: int) -> None:
        """Register `function` for `event`. Higher priorities are called first; equal priorities in registration order."""
        self._callbacks[event].append((priority, function))
        self._callbacks[event].sort(key=lambda pair: -pair[0])

    def run_callbacks(self, event: CallbackEvent, *arguments: object) -> None:
        """Call the callbacks of `event` with `arguments`. Raises the error of a callback that fails."""
        for _, function in self._callbacks[event]:
            function(*arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Call the callbacks of the event `end`. Raises the first error that a callback raises, unless the run has already failed."""
        first_error: BaseException | None = None
        for _, function in self._callbacks[CallbackEvent.end]:
            try:
                function()
            except Exception as raised:  # noqa: BLE001  # the other callbacks must be called too
                first_error = first_error or raised
        if first_error and not error:
            raise first_error
