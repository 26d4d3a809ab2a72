"""Step timer: the time that a step spends in each phase.

On a GPU the timestamps are CUDA events in the stream, so that the host need not wait for the device. A phase lasts from when the device
reaches the phase's event until it reaches the next event, including time in which the device waits for the host. Events are read once the
device has passed them, usually one step later.

data                     load samples and copy them to the device
forward                  forward pass
backward                 backward pass, with the communication that overlaps it; in a pipeline also waiting for other stages
communication            collectives after the last micro batch, including waiting for slower ranks
optimizer                gradient norm and parameter update
validation, checkpoint   time for which validation or checkpointing stalls training
logging                  report the previous step
other                    everything else
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER = "data", "forward", "backward", "communication", "optimizer"
VALIDATION, CHECKPOINT, LOGGING, OTHER = "validation", "checkpoint", "logging", "other"

Mark = float | torch.cuda.Event
"""Timestamp: seconds of the host's clock, or a CUDA event."""
PhaseKey = tuple[str, tuple[int, ...]]
"""A phase of a step: its name, and the indices of micro batch and pipeline stage if it belongs to one."""
StepListener = Callable[[Sequence[PhaseKey], Sequence[Mark]], None]
"""Function that is called for each step with its phases and their start timestamps, followed by the timestamp of the step's end."""


@dataclass
class _StepMarks:
    """The phases of one step, and the timestamp at which each began."""

    phases: list[PhaseKey] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


class StepTimer:
    """Measures the time, in seconds, of each phase of this rank's steps."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free_events: list[torch.cuda.Event] = []
        self._steps: deque[_StepMarks] = deque([_StepMarks()])
        self._phase_seconds: dict[str, float] = {}
        self.listeners: list[StepListener] = []
        """Functions that are called for each step whose timestamps are all known."""
        self.start_phase(OTHER)

    def start_phase(self, phase: str, *micro_batch_and_stage: int) -> None:
        """Start `phase`, which ends the current phase. `micro_batch_and_stage`: its micro batch and pipeline stage, if any."""
        step = self._steps[-1]
        step.phases.append((phase, micro_batch_and_stage))
        step.marks.append(self._record_timestamp())

    @contextmanager
    def time_phase(self, phase: str, *micro_batch_and_stage: int) -> Iterator[None]:
        """Context manager that attributes the time of its body to `phase`, then returns to the previous phase."""
        previous_phase, previous_indices = self._steps[-1].phases[-1]
        self.start_phase(phase, *micro_batch_and_stage)
        yield
        self.start_phase(previous_phase, *previous_indices)

    def end_step(self) -> dict[str, float]:
        """End the current step.

        Return the seconds per phase of the last step whose timestamps are known: on a GPU usually the previous step.
        """
        end = self._record_timestamp()
        self._steps[-1].marks.append(end)
        self._steps.append(_StepMarks([(OTHER, ())], [end]))
        self.read_finished_steps()
        return self._phase_seconds

    def read_finished_steps(self) -> None:
        """Read the timestamps of the steps whose end the device has passed."""
        while len(self._steps) > 1 and _is_timestamp_known(self._steps[0].marks[-1]):
            self._phase_seconds = self._sum_phase_seconds(self._steps.popleft())

    def _sum_phase_seconds(self, step: _StepMarks) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for (phase, _), begin, end in zip(step.phases, step.marks, step.marks[1:], strict=False):
            seconds[phase] += compute_elapsed_seconds(begin, end)
        for listener in self.listeners:
            listener(step.phases, step.marks)
        # The last mark is also the start of the next step, so it is not free yet.
        self._free_events += [mark for mark in step.marks[:-1] if isinstance(mark, torch.cuda.Event)]
        return dict(seconds)

    def _record_timestamp(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _is_timestamp_known(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]


def compute_elapsed_seconds(begin: Mark, end: Mark) -> float:
    """Return the seconds between two timestamps: two times of the host's clock, or two CUDA events that the device has passed."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are floats, or neither
    return float(begin.elapsed_time(end)) / 1000
