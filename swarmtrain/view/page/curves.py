"""Events → curves over steps. A run that went back to a checkpoint makes steps anew: of each step the newest value counts."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from swarmtrain import wire
from swarmtrain.wire import Event

MOST = 2000
"""Points of a curve that are shown at most: more than a screen has columns."""
_NUMBERS = ("loss", "loss_max", "tokens_per_second", "mfu", "tflops", "learning_rate", "gradient_norm")
_GROUPS = {"parts": "part", "memory": "memory", "metrics": "metric"}

Value = float | None


class Curve:
    """Values by step, in the order of steps. None is a value that was no finite number."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[Value] = []

    def put(self, step: int, value: Value) -> None:
        """Set the value of a step."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.values[at] = value
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)

    def cut(self, step: int) -> None:
        """Forget all that is beyond `step`."""
        at = bisect_right(self.steps, step)
        del self.steps[at:], self.values[at:]

    def thin(self, most: int = MOST) -> dict[str, list[Any]]:
        """Return steps and values, `most` at most: where points are left out, the least and the greatest of them stay."""
        count = len(self.steps)
        if count <= most:
            chosen: list[int] = list(range(count))
        else:
            buckets = (most - 2) // 2
            inner = count - 2
            edges = [1 + inner * number // buckets for number in range(buckets + 1)]
            chosen = [0]
            for low, high in pairwise(edges):
                chosen += self._extremes(low, high)
            chosen.append(count - 1)
        return {"steps": [self.steps[at] for at in chosen], "values": [_short(self.values[at]) for at in chosen]}

    def _extremes(self, low: int, high: int) -> list[int]:
        known = [at for at in range(low, high) if self.values[at] is not None]
        if not known:
            return [low]
        least, most = min(known, key=self._at), max(known, key=self._at)
        return sorted({least, most})

    def _at(self, position: int) -> float:
        value = self.values[position]
        return math.inf if value is None else value


class Curves:
    """All curves of a run, by name: those of progress, `held_out`, and `part.NAME`, `memory.NAME`, `metric.NAME`."""

    def __init__(self) -> None:
        self.named: dict[str, Curve] = {}
        self._newest = -1
        self._anew = False

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if event.kind in (wire.WORLD, wire.BOARD_UP):
            self._anew = True
        elif event.kind == wire.RESUMED and (step := _step(event)) is not None:
            self._cut(step)
        elif event.kind == wire.EVALUATION and (step := _step(event)) is not None:
            self._put("held_out", step, event.data.get("loss"))
        elif event.kind == wire.PROGRESS and (step := _step(event)) is not None:
            if self._anew and step <= self._newest:
                self._cut(step - 1)
            self._anew, self._newest = False, max(self._newest, step)
            for name, value in _numbers(event.data):
                self._put(name, step, value)

    def thin(self, most: int = MOST) -> dict[str, dict[str, list[Any]]]:
        """Return the points of all curves that have any, `most` of each at most."""
        return {name: curve.thin(most) for name, curve in self.named.items() if any(value is not None for value in curve.values)}

    def _put(self, name: str, step: int, value: Any) -> None:
        if name not in self.named:
            self.named[name] = Curve()
        self.named[name].put(step, _finite(value))

    def _cut(self, step: int) -> None:
        self._newest = min(self._newest, step)
        for curve in self.named.values():
            curve.cut(step)


def _step(event: Event) -> int | None:
    step = event.data.get("step")
    return step if isinstance(step, int) else None


def _numbers(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _NUMBERS:
        if name in data:
            yield name, data[name]
    for group, prefix in _GROUPS.items():
        found = data.get(group)
        if isinstance(found, Mapping):
            for name, value in found.items():
                yield f"{prefix}.{name}", value


def _finite(value: Any) -> Value:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _short(value: Value) -> Value:
    return None if value is None else float(f"{value:.6g}")
