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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER = "data", "forward", "backward", "communication", "optimizer"
EVALUATION, CHECKPOINT, LOGGING, OTHER = "evaluation", "checkpoint", "logging", "other"

Mark = float | torch.cuda.Event
"""A moment: seconds of the host's clock, or what a GPU has come to."""
Piece = tuple[str, tuple[int, ...]]
"""A part of a step, and of which micro batch and which stage of a pipeline it is, if it is of one."""
Listener = Callable[[Sequence[Piece], Sequence[Mark]], None]
"""Is told of each step what began in it, and when; the last mark, of which there is one more, is its end."""


@dataclass
class _Lap:
    """The marks of one step: what begins, and when."""

    pieces: list[Piece] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


class Parts:
    """The clock of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spare: list[torch.cuda.Event] = []
        self._laps: deque[_Lap] = deque([_Lap()])
        self._seconds: dict[str, float] = {}
        self.listener: Listener | None = None
        """Is told of every step whose marks are known."""
        self.begins(OTHER)

    def begins(self, part: str, *where: int) -> None:
        """Say that from now on it is this part: `where`, of this micro batch, and of this stage of a pipeline."""
        lap = self._laps[-1]
        lap.pieces.append((part, where))
        lap.marks.append(self._mark())

    @contextmanager
    def of(self, part: str, *where: int) -> Iterator[None]:
        """Make this part in the body, and what was before goes on after it."""
        before, elsewhere = self._laps[-1].pieces[-1]
        self.begins(part, *where)
        yield
        self.begins(before, *elsewhere)

    def step(self) -> dict[str, float]:
        """A step has ended. Return the seconds of each part of the last one whose marks are known: on a GPU, of the one before."""
        end = self._mark()
        self._laps[-1].marks.append(end)
        self._laps.append(_Lap([(OTHER, ())], [end]))
        self.catch_up()
        return self._seconds

    def catch_up(self) -> None:
        """Read the steps whose end the device has passed."""
        while len(self._laps) > 1 and _passed(self._laps[0].marks[-1]):
            self._seconds = self._read(self._laps.popleft())

    def _read(self, lap: _Lap) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for (part, _), begin, end in zip(lap.pieces, lap.marks, lap.marks[1:], strict=False):
            found[part] += between(begin, end)
        if self.listener:
            self.listener(lap.pieces, lap.marks)
        # The last is where the next lap begins.
        self._spare += [mark for mark in lap.marks[:-1] if isinstance(mark, torch.cuda.Event)]
        return dict(found)

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _passed(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]


def between(begin: Mark, end: Mark) -> float:
    """Return the seconds from one mark to another of the same kind, both passed."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are, or none
    return float(begin.elapsed_time(end)) / 1000
