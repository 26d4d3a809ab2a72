"""Timeline of all ranks over several steps: one trace file for Perfetto, which shows a process per node and a thread per rank.

Each rank takes timestamps from its own clock, and these clocks have no common origin. Before the timestamps are merged, each rank queries
the clock of rank 0 repeatedly. The response with the shortest round trip gives the clock offset, with an error of at most half of the
round-trip time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.trainer import collectives
from swarmtrain.trainer.health.step_timer import BACKWARD, Mark, PhaseKey, StepTimer, compute_elapsed_seconds
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_CLOCK_SAMPLES = 20
"""Number of times that each rank queries the clock of rank 0 to measure its clock offset."""
_MIN_SPAN_SECONDS = 1e-7
"""Minimum duration of a phase in seconds; shorter phases are omitted."""


@dataclass(frozen=True)
class PhaseSpan:
    """Start time and duration, in seconds, of one phase of one step on one rank."""

    step: int
    phase: str
    indices: tuple[int, ...]
    """Indices of the micro batch and the pipeline stage to which the phase belongs, if any."""
    start_seconds: float
    """Start of the phase, in seconds on rank 0's clock."""
    seconds: float


@dataclass(frozen=True)
class RankTimeline:
    """Phase spans of one rank, with its node, mesh coordinates and clock error."""

    node: str
    coordinates: str
    """Coordinates of the rank in the device mesh, as text."""
    clock_error: float
    """Maximum error of the rank's timestamps relative to rank 0, in seconds."""
    spans: tuple[PhaseSpan, ...]


class TimelineRecorder:
    """Records the phases of this rank's step timer, and writes the timeline of all ranks. A no-op if the config selects no steps."""

    def __init__(self, runtime: Runtime, mesh: Mesh, timer: StepTimer) -> None:
        config = runtime.config.profiler
        self._runtime, self._timer = runtime, timer
        self._coordinates = f"pipe {mesh.pipe_rank} data {mesh.replica_rank} tensor {mesh.tensor_rank}"
        self._start_step, self._step_count = config.timeline_start_at_step, config.timeline_steps
        self._step_numbers: list[int] = []
        """Numbers of the steps that have ended since the last restart."""
        self._steps_received = 0
        self._spans: list[tuple[int, str, tuple[int, ...], float, float]] = []
        if self._step_count:
            timer.listeners.append(self._receive_step_phases)
            self._anchor = self._record_clock_anchor()

    def record_step_end(self, number: int) -> None:
        """Record that step `number` has ended. Collective: all ranks must call it."""
        if not self._step_count:
            return
        self._step_numbers.append(number)
        if len(self._step_numbers) == self._start_step - 1:
            self._anchor = self._record_clock_anchor()  # GPU timestamps lose accuracy with the age of the anchor
        elif len(self._step_numbers) > self._start_step + self._step_count:  # GPU timestamps of a step are known one step later
            self.close()

    def close(self) -> None:
        """Write the timeline, unless it is already written. Collective: all ranks must call it."""
        if not self._step_count or len(self._step_numbers) <= self._start_step:
            return
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize()
        self._timer.read_finished_steps()
        self._timer.listeners.remove(self._receive_step_phases)
        self._step_count = 0
        offset, clock_error = _measure_clock_offset(self._runtime)
        spans = tuple(
            PhaseSpan(self._step_numbers[step_index], phase, indices, start_seconds + offset, seconds)
            for step_index, phase, indices, start_seconds, seconds in self._spans
        )
        timelines = collectives.all_gather_values(asdict(RankTimeline(self._runtime.node, self._coordinates, clock_error, spans)))
        if self._runtime.is_rank_zero:
            self._write_trace([_build_timeline(fields) for fields in timelines])

    def _write_trace(self, timelines: Sequence[RankTimeline]) -> None:
        path = self._runtime.output_folder / "timeline.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(build_trace(timelines)))
        except OSError as error:
            LOG.warning("%s: the timeline cannot be written: %s", path, describe_os_error(error))
        else:
            LOG.info("timeline of %d ranks: %s, accurate to %.0f µs", len(timelines), path, _find_max_clock_error(timelines) * 1e6)

    def _record_clock_anchor(self) -> tuple[Mark, float]:
        """Take a timestamp of the step timer, and return it with the host clock's time in seconds at the same moment."""
        if self._runtime.device.type != "cuda":
            return 0.0, 0.0
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # not typed in torch
        event.record()
        torch.cuda.synchronize()
        return event, time.perf_counter()

    def _receive_step_phases(self, phases: Sequence[PhaseKey], marks: Sequence[Mark]) -> None:
        step_index, self._steps_received = self._steps_received, self._steps_received + 1
        if not self._start_step <= step_index < self._start_step + self._step_count:
            return
        mark, moment = self._anchor
        start_times = [moment + compute_elapsed_seconds(mark, each) for each in marks]
        for (phase, indices), begin, end in zip(phases, start_times, start_times[1:], strict=False):
            if end - begin > _MIN_SPAN_SECONDS:
                self._spans.append((step_index, phase, indices, begin, end - begin))


def _build_timeline(fields: dict[str, Any]) -> RankTimeline:
    """Return the timeline whose asdict() is `fields`."""
    return RankTimeline(**{**fields, "spans": tuple(PhaseSpan(**span) for span in fields["spans"])})


def build_trace(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    """Return `timelines`, in rank order, in the Trace Event Format of Chrome and Perfetto."""
    nodes = list(dict.fromkeys(timeline.node for timeline in timelines))
    events = [_build_name_metadata_event("process", pid, None, node) for pid, node in enumerate(nodes)]
    start = min((span.start_seconds for timeline in timelines for span in timeline.spans), default=0.0)
    for rank, timeline in enumerate(timelines):
        pid = nodes.index(timeline.node)
        events += [
            _build_name_metadata_event("thread", pid, rank, f"rank {rank}: {timeline.coordinates}"),
            *_build_step_events(timeline, start, {"pid": pid, "tid": rank}),
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"accuracy_microseconds": round(_find_max_clock_error(timelines) * 1e6, 1)},
    }


def _build_step_events(timeline: RankTimeline, trace_start_seconds: float, thread_ids: dict[str, int]) -> Iterator[dict[str, Any]]:
    for step in dict.fromkeys(span.step for span in timeline.spans):
        spans = [span for span in timeline.spans if span.step == step]
        begin, end = spans[0].start_seconds, spans[-1].start_seconds + spans[-1].seconds
        yield {
            "ph": "X",
            "name": f"step {step}",
            "cat": "step",
            "ts": (begin - trace_start_seconds) * 1e6,
            "dur": (end - begin) * 1e6,
            **thread_ids,
        }
        for span in spans:
            index_args = dict(zip(("micro_batch", "stage"), span.indices, strict=False))
            yield {
                "ph": "X",
                "name": _format_span_title(span),
                "cat": span.phase,
                "ts": (span.start_seconds - trace_start_seconds) * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"step": step, **index_args},
                **thread_ids,
            }


def _format_span_title(span: PhaseSpan) -> str:
    if span.indices:
        return f"{span.phase} {span.indices[0]}"
    return "waits for other stages" if span.phase == BACKWARD else span.phase


def _build_name_metadata_event(process_or_thread: str, pid: int, tid: int | None, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{process_or_thread}_name", "pid": pid, **({} if tid is None else {"tid": tid}), "args": {"name": name}}


def _find_max_clock_error(timelines: Sequence[RankTimeline]) -> float:
    return max((timeline.clock_error for timeline in timelines), default=0.0)


def _measure_clock_offset(runtime: Runtime) -> tuple[float, float]:
    """Return the clock offset, rank 0's clock minus this rank's clock, and its maximum error, both in seconds.

    Collective: all ranks must call it.
    """
    offset_and_error, clock = (0.0, 0.0), torch.zeros(1, dtype=torch.float64)
    for rank in range(1, runtime.world_size):
        if runtime.is_rank_zero:
            for _ in range(_CLOCK_SAMPLES):
                dist.recv(clock, rank)
                clock[0] = time.perf_counter()
                dist.send(clock, rank)
        elif runtime.rank == rank:
            offset_and_error = min((_sample_clock_offset(clock) for _ in range(_CLOCK_SAMPLES)), key=lambda sample: sample[1])
    return offset_and_error


def _sample_clock_offset(clock: torch.Tensor) -> tuple[float, float]:
    start_time = time.perf_counter()
    dist.send(clock, 0)
    dist.recv(clock, 0)
    end_time = time.perf_counter()
    return float(clock) - (start_time + end_time) / 2, (end_time - start_time) / 2
