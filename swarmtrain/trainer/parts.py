"""Where the time of a step goes: a clock that is told what begins, and adds up how long each part lasts.

On a GPU its marks are events in what is queued for the device, so that nothing waits for them: a part lasts from the moment
in which the device comes to it to that in which it comes to the next, waiting for the host included. They are read a step
later, when the device has certainly passed them.

data            samples are read, and sent to the device
forward         the forward pass
backward        the backward pass, with what ranks exchange meanwhile; in a pipeline, with its waiting for other stages
communication   what ranks tell each other when passes are done: what takes longer elsewhere is waited for here
optimizer       the norm of the gradient, and the update of parameters
evaluation, checkpoint   while training stands still for them
logging         telling how the step before went
other           everything else
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER = "data", "forward", "backward", "communication", "optimizer"
EVALUATION, CHECKPOINT, LOGGING, OTHER = "evaluation", "checkpoint", "logging", "other"


@dataclass
class _Lap:
    """The marks of one step: what begins, and when."""

    parts: list[str] = field(default_factory=list)
    marks: list[float | torch.cuda.Event] = field(default_factory=list)


class Parts:
    """The clock of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spare: list[torch.cuda.Event] = []
        self._laps: deque[_Lap] = deque([_Lap()])
        self._seconds: dict[str, float] = {}
        self.begins(OTHER)

    def begins(self, part: str) -> None:
        """Say that from now on it is this part."""
        lap = self._laps[-1]
        lap.parts.append(part)
        lap.marks.append(self._mark())

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Make this part in the body, and what was before goes on after it."""
        before = self._laps[-1].parts[-1]
        self.begins(part)
        yield
        self.begins(before)

    def step(self) -> dict[str, float]:
        """A step has ended. Return the seconds of each part of the last one whose marks are known: on a GPU, of the one before."""
        end = self._mark()
        self._laps[-1].marks.append(end)
        self._laps.append(_Lap([OTHER], [end]))
        while len(self._laps) > 1 and _passed(self._laps[0].marks[-1]):
            self._seconds = self._read(self._laps.popleft())
        return self._seconds

    def _read(self, lap: _Lap) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for part, begin, end in zip(lap.parts, lap.marks, lap.marks[1:], strict=False):
            found[part] += _between(begin, end)
        # The last is where the next lap begins.
        self._spare += [mark for mark in lap.marks[:-1] if isinstance(mark, torch.cuda.Event)]
        return dict(found)

    def _mark(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _passed(mark: float | torch.cuda.Event) -> bool:
    return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are, or none
    return float(begin.elapsed_time(end)) / 1000
