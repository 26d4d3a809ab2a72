"""Working time of each rank per step, excluding the time that it waits for other ranks.

A step takes equally long on every rank, since all wait for the slowest. So two times are measured that include little or no waiting: data
loading, and the forward pass of a block. In the forward pass a rank waits at most for the tensor-parallel ranks that share its layers:
fully_shard gathers the block's parameters, and a pipeline stage receives its input, before that pass begins. On a GPU, CUDA events mark
its start and end. They are read after the step has synchronized with the device anyway, so reading them adds no synchronization.

If micro batches are assigned by speed, the forward and backward passes of whole micro batches are measured, too. The last one of a step is
left out, because its backward pass includes waiting for the other replicas.

Ranks compare their timings at intervals. The interval is a number of steps computed from values that all ranks share, so that all ranks
compare at the same step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from swarmtrain.trainer import collectives
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.health.step_timer import FORWARD, Mark, PhaseKey, compute_elapsed_seconds
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.runtime import Runtime

MIN_INTERVAL_SECONDS = 10.0
"""Minimum time in seconds between two comparisons."""
MIN_INTERVAL_STEPS = 8
"""Minimum number of steps between two comparisons, so that one slow step does not change the median."""
_MAX_TIMED_BLOCKS = 4
"""Maximum number of blocks whose forward pass is timed, once per step; all blocks are alike."""


@dataclass(frozen=True)
class RankTiming:
    """Time that one rank works in a step, in seconds: medians over several steps."""

    node: str
    stage: int
    """Pipeline stage of the rank. Ranks of the same stage hold the same layers."""
    step_seconds: float
    """Duration of the whole step, including waiting."""
    micro_batch_count: int
    """Number of micro batches that the rank's replica processes per step."""
    block_count: int
    """Number of transformer blocks on this rank."""
    block_seconds: float
    """Duration of one block's forward pass."""
    data_seconds: float
    """Duration of loading one micro batch."""
    replica: int = 0
    """Index of the replica to which the rank belongs."""
    forward_seconds: float = 0.0
    """Duration of one micro batch's forward pass; 0 unless micro batches are assigned by speed."""
    micro_batch_seconds: float | None = None
    """Duration of one micro batch's forward and backward pass; None if the replica has a single micro batch, or it is not measured."""


class RankTimer:
    """Measures this rank's working time per step. It registers hooks on the model's blocks, so create only one RankTimer per model."""

    def __init__(self, runtime: Runtime, model: ParallelModel, data: TokenDataset) -> None:
        self._runtime, self._data = runtime, data
        blocks = [block for block in model.local_model.blocks if next(block.parameters(), None) is not None]
        self._block_count, self._timed_blocks = len(blocks), blocks[:: ceil(len(blocks) / _MAX_TIMED_BLOCKS) or 1]
        self._pending_blocks: set[nn.Module] = set()
        self._marks = _CudaEventMarks() if runtime.device.type == "cuda" else _HostClockMarks()
        self._step_timings: list[tuple[float, float, float]] = []
        self._pass_timings: list[tuple[float, float | None]] = []
        """For each step, the mean duration of a forward pass, and of a forward and backward pass."""
        self._interval_steps = MIN_INTERVAL_STEPS
        if runtime.world_size > 1:
            for block in self._timed_blocks:
                block.register_forward_pre_hook(self._record_block_start)
                block.register_forward_hook(self._record_block_end, prepend=True)  # before fully_shard's own hook

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Context manager that times one step. The step must synchronize with the device before it ends."""
        start_time, data_seconds_before = time.perf_counter(), self._data.load_seconds
        self._pending_blocks = set(self._timed_blocks)
        yield
        self._pending_blocks.clear()
        durations = self._marks.take_durations()
        data_seconds = self._data.load_seconds - data_seconds_before
        self._step_timings.append((time.perf_counter() - start_time, fmean(durations) if durations else 0.0, data_seconds))

    def record_passes(self, phases: Sequence[PhaseKey], marks: Sequence[Mark]) -> None:
        """Record how long the passes of the micro batches of one step took. A listener of the step timer, see StepListener."""
        seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (phase, indices), begin, end in zip(phases, marks, marks[1:], strict=False):
            if indices:
                seconds[indices[0]][phase] += compute_elapsed_seconds(begin, end)
        if seconds:
            *complete, _ = micro_batches = list(seconds.values())
            self._pass_timings.append(
                (fmean(each[FORWARD] for each in micro_batches), fmean(sum(each.values()) for each in complete) if complete else None)
            )

    def gather_timings(self, mesh: Mesh) -> list[RankTiming] | None:
        """Gather and return the timings of all ranks since the last comparison, in rank order; None if no comparison is due.

        `mesh`: the mesh, with the assignment of micro batches since the last comparison. Called by all ranks together, after each step.
        """
        if len(self._step_timings) < self._interval_steps:
            return None
        step_seconds, block_seconds, data_seconds = (median(values) for values in zip(*self._step_timings, strict=True))
        forward_seconds, micro_batch_seconds = self._take_pass_medians()
        self._step_timings.clear()
        if self._runtime.world_size == 1:
            return None
        micro_batch_count = mesh.micro_batches_per_replica[mesh.data_rank] * len(mesh.local_learners)
        timing = RankTiming(
            self._runtime.node,
            mesh.pipe_rank,
            step_seconds,
            micro_batch_count,
            self._block_count,
            block_seconds,
            data_seconds / max(1, micro_batch_count),
            mesh.data_rank,
            forward_seconds,
            micro_batch_seconds,
        )
        timings = [RankTiming(**fields) for fields in collectives.all_gather_values(asdict(timing))]
        self._interval_steps = max(MIN_INTERVAL_STEPS, ceil(MIN_INTERVAL_SECONDS / max(timing.step_seconds for timing in timings)))
        return timings

    def _take_pass_medians(self) -> tuple[float, float | None]:
        """Return the medians of the recorded durations of passes, and clear the records."""
        records, self._pass_timings = self._pass_timings, []
        complete = [seconds for _, seconds in records if seconds is not None]
        return median(seconds for seconds, _ in records) if records else 0.0, median(complete) if complete else None

    def _record_block_start(self, block: nn.Module, _inputs: Any) -> None:
        if block in self._pending_blocks:
            self._marks.record_timestamp()

    def _record_block_end(self, block: nn.Module, _inputs: Any, _output: Any) -> None:
        if block in self._pending_blocks:
            self._pending_blocks.remove(block)
            self._marks.record_timestamp()


class _HostClockMarks:
    """Records timestamps of the host's clock, for devices other than CUDA."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def record_timestamp(self) -> None:
        """Record a timestamp."""
        self._marks.append(time.perf_counter())

    def take_durations(self) -> list[float]:
        """Return the seconds from start to end of each recorded pair of timestamps, and clear the timestamps."""
        marks, self._marks = self._marks, []
        return [end - begin for begin, end in zip(marks[::2], marks[1::2], strict=False)]


class _CudaEventMarks:
    """Records timestamps as CUDA events in the current stream. The same events are reused in each step."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._count = 0

    def record_timestamp(self) -> None:
        """Record an event in the current stream."""
        if self._count == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._count].record()
        self._count += 1

    def take_durations(self) -> list[float]:
        """Return the seconds from start to end of each recorded pair of events, and clear the events.

        Pairs that the device has not reached yet are omitted.
        """
        marks, self._count = self._events[: self._count], 0
        pairs = zip(marks[::2], marks[1::2], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs if end.query()]  # type: ignore[no-untyped-call]
