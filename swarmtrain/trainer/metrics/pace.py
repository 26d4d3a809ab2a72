"""How long this rank works in a step, apart from what it waits for others.

A step takes as long on every rank, since all wait for the slowest. What tells them apart lies between collectives: the time
that loading takes, and that of a block's forward pass, in which no rank waits for another unless they share its layers.
fully_shard gathers a block's parameters, and a pipeline receives its input, before that begins. On a GPU events mark it,
which are read after the step has waited for the device anyway: nothing waits for them.

Now and then ranks compare. When is a number of steps that follows from what all of them know, so that all do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from swarmtrain.trainer import agreement
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime

EVERY = 10.0
"""Seconds between two comparisons, at least."""
STEPS = 8
"""Steps between two comparisons, at least: one that is slow by chance is no median of so many."""
_MEASURED = 4
"""Blocks that are measured, once a step; they are alike."""


@dataclass(frozen=True)
class Work:
    """What one rank has to do in a step, in seconds; medians over some steps."""

    node: str
    stage: int
    """Its place in its pipeline: ranks of the same have the same layers."""
    step: float
    """All of the step, waiting included."""
    passes: int
    """Micro batches that its replica has."""
    blocks: int
    """Blocks that it has."""
    block: float
    """One block's forward pass."""
    data: float
    """Loading what one pass takes."""


class Pace:
    """Measures the steps of this rank. Hangs hooks on its blocks, so that there must be one of these for a model."""

    def __init__(self, here: Runtime, model: ParallelModel, data: Samples) -> None:
        self._here, self._data = here, data
        self._stage, self._passes = model.mesh.pipe_rank, model.mesh.shares[model.mesh.data_rank]
        blocks = [block for block in model.local.blocks if next(block.parameters(), None) is not None]
        self._blocks, self._measured = len(blocks), blocks[:: ceil(len(blocks) / _MEASURED) or 1]
        self._due: set[nn.Module] = set()
        self._marks = _Events() if here.device.type == "cuda" else _Times()
        self._steps: list[tuple[float, float, float]] = []
        self._every = STEPS
        if here.size > 1:
            for block in self._measured:
                block.register_forward_pre_hook(self._enters)
                block.register_forward_hook(self._leaves, prepend=True)  # before what fully_shard does then

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make a step in the body, which waits for the device before it ends."""
        begun, read = time.perf_counter(), self._data.seconds
        self._due = set(self._measured)
        yield
        self._due.clear()
        spans = self._marks.spans()
        data = (self._data.seconds - read) / max(1, self._passes)
        self._steps.append((time.perf_counter() - begun, fmean(spans) if spans else 0.0, data))

    def compared(self) -> list[Work] | None:
        """Return the work of all ranks since the last time, by rank, if it is time to compare. Called by all after each step."""
        if len(self._steps) < self._every:
            return None
        step, block, data = (median(values) for values in zip(*self._steps, strict=True))
        self._steps.clear()
        if self._here.size == 1:
            return None
        everybody = agreement.gather(Work(self._here.node, self._stage, step, self._passes, self._blocks, block, data))
        self._every = max(STEPS, ceil(EVERY / max(work.step for work in everybody)))
        return everybody

    def _enters(self, block: nn.Module, _given: Any) -> None:
        if block in self._due:
            self._marks.set()

    def _leaves(self, block: nn.Module, _given: Any, _made: Any) -> None:
        if block in self._due:
            self._due.remove(block)
            self._marks.set()


class _Times:
    """Marks by the host's clock."""

    def __init__(self) -> None:
        self._set: list[float] = []

    def set(self) -> None:
        """Mark this moment."""
        self._set.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Return the seconds between each two marks, and forget them."""
        marks, self._set = self._set, []
        return [end - begin for begin, end in zip(marks[::2], marks[1::2], strict=False)]


class _Events:
    """Marks in what is queued for a GPU. The same events are used again each step."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._count = 0

    def set(self) -> None:
        """Mark where the queue is now."""
        if self._count == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._count].record()
        self._count += 1

    def spans(self) -> list[float]:
        """Return the seconds between each two marks, and forget them. Those that the device has not come to yet are left out."""
        marks, self._count = self._events[: self._count], 0
        pairs = zip(marks[::2], marks[1::2], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs if end.query()]  # type: ignore[no-untyped-call]
