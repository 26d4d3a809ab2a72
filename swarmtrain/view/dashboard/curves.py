"""Curves of metrics over steps, computed from a run's events.

A run that resumed from a checkpoint recomputes steps: the newest value of each step replaces older ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from swarmtrain import protocol
from swarmtrain.protocol import Event

MAX_POINTS = 2000
"""Maximum number of displayed points of a curve. It exceeds the number of pixel columns of a screen."""
_SCALARS = ("loss", "max_replica_loss", "tokens_per_second", "mfu", "tflops", "learning_rate", "gradient_norm")
_GROUP_PREFIXES = {"phases": "phase", "memory": "memory", "metrics": "metric"}

CurveValue = float | None


class Curve:
    """Curve of one metric: its values by step, in ascending order of steps. A non-finite value is stored as None."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[CurveValue] = []

    def set_value(self, step: int, value: CurveValue) -> None:
        """Set the curve's value at `step`."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        index = bisect_left(self.steps, step)
        if self.steps[index] == step:
            self.values[index] = value
        else:
            self.steps.insert(index, step)
            self.values.insert(index, value)

    def truncate_after(self, step: int) -> None:
        """Remove all values of the curve after `step`."""
        index = bisect_right(self.steps, step)
        del self.steps[index:], self.values[index:]

    def downsample_points(self, max_points: int = MAX_POINTS) -> dict[str, list[Any]]:
        """Return the curve's steps and values, downsampled to at most `max_points` points.

        A longer curve is divided into intervals, of which only the minimum and the maximum are kept.
        """
        count = len(self.steps)
        if count <= max_points:
            chosen_indices: list[int] = list(range(count))
        else:
            buckets = (max_points - 2) // 2
            inner_count = count - 2
            edges = [1 + inner_count * number // buckets for number in range(buckets + 1)]
            chosen_indices = [0]
            for low, high in pairwise(edges):
                chosen_indices += self._find_extreme_indices(low, high)
            chosen_indices.append(count - 1)
        return {
            "steps": [self.steps[index] for index in chosen_indices],
            "values": [_round_value(self.values[index]) for index in chosen_indices],
        }

    def _find_extreme_indices(self, start_index: int, end_index: int) -> list[int]:
        finite_indices = [index for index in range(start_index, end_index) if self.values[index] is not None]
        if not finite_indices:
            return [start_index]
        lowest, highest = min(finite_indices, key=self._get_sort_key), max(finite_indices, key=self._get_sort_key)
        return sorted({lowest, highest})

    def _get_sort_key(self, position: int) -> float:
        value = self.values[position]
        return math.inf if value is None else value


class CurveSet:
    """All curves of a run by name: those of progress events, `validation`, and `phase.NAME`, `memory.NAME`, `metric.NAME`."""

    def __init__(self) -> None:
        self.curves_by_name: dict[str, Curve] = {}
        self._newest_step = -1
        self._is_restarted = False

    def add_event(self, event: Event) -> None:
        """Add the values in the next event to the curves."""
        if event.kind in (protocol.EVENT_WORLD_FORMED, protocol.EVENT_COORDINATOR_STARTED):
            self._is_restarted = True
        elif event.kind == protocol.EVENT_RESUMED and (step := _get_event_step(event)) is not None:
            self._truncate_after(step)
        elif event.kind == protocol.EVENT_EVALUATION and (step := _get_event_step(event)) is not None:
            self._set_value("validation", step, event.data.get("loss"))
        elif event.kind == protocol.EVENT_PROGRESS and (step := _get_event_step(event)) is not None:
            if self._is_restarted and step <= self._newest_step:
                self._truncate_after(step - 1)
            self._is_restarted, self._newest_step = False, max(self._newest_step, step)
            for name, value in _iterate_scalars(event.data):
                self._set_value(name, step, value)

    def downsample_curves(self, max_points: int = MAX_POINTS) -> dict[str, dict[str, list[Any]]]:
        """Return, by curve name, the points of all curves with a finite value, at most `max_points` per curve."""
        return {
            name: curve.downsample_points(max_points)
            for name, curve in self.curves_by_name.items()
            if any(value is not None for value in curve.values)
        }

    def _set_value(self, curve_name: str, step: int, value: Any) -> None:
        if curve_name not in self.curves_by_name:
            self.curves_by_name[curve_name] = Curve()
        self.curves_by_name[curve_name].set_value(step, _convert_to_finite_number(value))

    def _truncate_after(self, step: int) -> None:
        self._newest_step = min(self._newest_step, step)
        for curve in self.curves_by_name.values():
            curve.truncate_after(step)


def _get_event_step(event: Event) -> int | None:
    step = event.data.get("step")
    return step if isinstance(step, int) else None


def _iterate_scalars(progress_data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _SCALARS:
        if name in progress_data:
            yield name, progress_data[name]
    for group, prefix in _GROUP_PREFIXES.items():
        group_values = progress_data.get(group)
        if isinstance(group_values, Mapping):
            for name, value in group_values.items():
                yield f"{prefix}.{name}", value


def _convert_to_finite_number(value: Any) -> CurveValue:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _round_value(value: CurveValue) -> CurveValue:
    return None if value is None else float(f"{value:.6g}")
