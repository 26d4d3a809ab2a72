"""Restart budget of a run: how many failures it allows, and when a repeated failure is treated as a bug in the script.

Pure: `clock` returns the time (seconds, monotonic). The failure of a world counts once, no matter how many of its ranks fail.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from swarmtrain.entrypoint.coordinator.node_quarantine import HOUR_SECONDS, is_machine_failure
from swarmtrain.protocol import is_collateral_failure

_VARIABLE_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


class RestartBudget:
    """Restart budget of one run: counts its failures, and decides when no restart is left."""

    def __init__(self, max_restarts: int, max_restarts_per_hour: int, clock: Callable[[], float]) -> None:
        self._max_restarts, self._max_restarts_per_hour = max_restarts, max_restarts_per_hour
        self._clock = clock
        self._consecutive_failures = 0
        self._failure_times: deque[float] = deque()
        self._last_failure: tuple[str, str | None] = "", None
        self._previous_signature: str | None = None

    def reset_consecutive_failures(self) -> None:
        """Reset the count of consecutive failures, because the run has completed a new step."""
        self._consecutive_failures = 0

    def record_failure(self) -> None:
        """Record that a world has failed."""
        self._consecutive_failures += 1
        self._failure_times.append(self._clock())
        while self._failure_times[0] <= self._clock() - HOUR_SECONDS:
            self._failure_times.popleft()

    def record_failure_cause(self, world: str, failure: Mapping[str, Any]) -> None:
        """Record the cause of `world`'s failure from the failure event's data."""
        if self._last_failure[0] != world:
            self._previous_signature = self._last_failure[1]
        self._last_failure = world, _build_bug_signature(failure)

    @property
    def exhaustion_reason(self) -> str | None:
        """Reason to give up the run because its restart budget is exhausted; None if restarts are left."""
        if self._consecutive_failures > self._max_restarts:
            failure_count = "once" if self._consecutive_failures == 1 else f"{self._consecutive_failures} times in a row"
            return f"failed {failure_count} without a new step, max_restarts is {self._max_restarts}"
        if len(self._failure_times) > self._max_restarts_per_hour:
            return f"failed {len(self._failure_times)} times within 1 h, max_restarts_per_hour is {self._max_restarts_per_hour}"
        return None

    @property
    def repeated_failure_reason(self) -> str | None:
        """Reason to treat the last failure as a bug: the failure before it was the same exception at the same step. Otherwise None."""
        is_repeated = self._last_failure[1] is not None and self._last_failure[1] == self._previous_signature
        return "same error at the same step as before: not a machine fault" if is_repeated else None


def _build_bug_signature(failure: Mapping[str, Any]) -> str | None:
    """Return a signature of an exception and its step. None for failures that a machine may have caused, or whose step is unknown."""
    step = failure.get("step")
    is_machine_fault = is_machine_failure(failure) or is_collateral_failure(failure) or failure.get("oom")
    if is_machine_fault or failure.get("permanent") is False or not isinstance(step, int):
        return None
    return f"{step}: {_VARIABLE_NUMBERS.sub('#', str(failure.get('error')))}"
