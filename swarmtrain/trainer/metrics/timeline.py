"""What every rank does when, in some steps: one file, a process a node and a thread a rank, to be opened in Perfetto.

Ranks mark moments by their own clocks, which share no beginning. Before they are put together each rank asks rank 0 for its
time, again and again; the quickest answer tells how far its clock is off, to within half of the time it took.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from swarmtrain.config.files import reason
from swarmtrain.trainer import agreement
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parts import BACKWARD, Mark, Parts, Piece, between
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_QUESTIONS = 20
"""How often a rank asks for the time."""
_SHORTEST = 1e-7
"""Seconds under which a part is not shown: nothing was done in it."""


@dataclass(frozen=True)
class Span:
    """One part of one step on one rank."""

    step: int
    part: str
    where: tuple[int, ...]
    """The micro batch, and the stage of a pipeline."""
    begin: float
    """Seconds by rank 0's clock."""
    seconds: float


@dataclass(frozen=True)
class Row:
    """What one rank did."""

    node: str
    place: str
    """Its coordinates in the topology."""
    accuracy: float
    """Seconds by which its moments may be wrong, seen from rank 0."""
    spans: tuple[Span, ...]


class Timeline:
    """Listens to the clock of this rank, and writes what all have heard; does nothing if the config names no steps."""

    def __init__(self, here: Runtime, mesh: Mesh, parts: Parts) -> None:
        config = here.config.profiler
        self._here, self._parts = here, parts
        self._place = f"pipe {mesh.pipe_rank} data {mesh.data_rank} tensor {mesh.tensor_rank}"
        self._first, self._count = config.timeline_start_at_step, config.timeline_steps
        self._numbers: list[int] = []
        """Of the steps that were made in this world."""
        self._heard = 0
        self._spans: list[tuple[int, str, tuple[int, ...], float, float]] = []
        if self._count:
            parts.listener = self._listen
            self._anchor = self._now()

    def after_step(self, number: int) -> None:
        """Step `number` is made. Called by all ranks together."""
        if not self._count:
            return
        self._numbers.append(number)
        if len(self._numbers) == self._first - 1:
            self._anchor = self._now()  # a GPU's clock is the less exact, the longer ago this is
        elif len(self._numbers) > self._first + self._count:  # of the last one a GPU's marks are known a step later
            self.close()

    def close(self) -> None:
        """Write what there is, if that has not been done. Called by all ranks together."""
        if not self._count or len(self._numbers) <= self._first:
            return
        if self._here.device.type == "cuda":
            torch.cuda.synchronize()
        self._parts.catch_up()
        self._parts.listener, self._count = None, 0
        offset, accuracy = _offset(self._here)
        spans = tuple(Span(self._numbers[lap], part, where, at + offset, long) for lap, part, where, at, long in self._spans)
        rows = agreement.to_first_rank(Row(self._here.node, self._place, accuracy, spans))
        if self._here.first:
            self._write(rows)

    def _write(self, rows: Sequence[Row]) -> None:
        path = self._here.folder / "timeline.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(trace(rows)))
        except OSError as error:
            LOG.warning("%s: no timeline, since it cannot be written: %s", path, reason(error))
        else:
            LOG.info("timeline of %d ranks: %s, exact to %.0f µs", len(rows), path, _accuracy(rows) * 1e6)

    def _now(self) -> tuple[Mark, float]:
        """Return a mark, and when it is by the host's clock."""
        if self._here.device.type != "cuda":
            return 0.0, 0.0
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own is not typed
        event.record()
        torch.cuda.synchronize()
        return event, time.perf_counter()

    def _listen(self, pieces: Sequence[Piece], marks: Sequence[Mark]) -> None:
        lap, self._heard = self._heard, self._heard + 1
        if not self._first <= lap < self._first + self._count:
            return
        mark, moment = self._anchor
        begins = [moment + between(mark, each) for each in marks]
        for (part, where), begin, end in zip(pieces, begins, begins[1:], strict=False):
            if end - begin > _SHORTEST:
                self._spans.append((lap, part, where, begin, end - begin))


def trace(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what `rows`, by rank, show, in the Trace Event Format of Chrome and Perfetto."""
    nodes = list(dict.fromkeys(row.node for row in rows))
    events = [_name("process", pid, None, node) for pid, node in enumerate(nodes)]
    start = min((span.begin for row in rows for span in row.spans), default=0.0)
    for rank, row in enumerate(rows):
        pid = nodes.index(row.node)
        events += [_name("thread", pid, rank, f"rank {rank}: {row.place}"), *_events(row, start, {"pid": pid, "tid": rank})]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"accuracy_microseconds": round(_accuracy(rows) * 1e6, 1)}}


def _events(row: Row, start: float, whose: dict[str, int]) -> Iterator[dict[str, Any]]:
    for step in dict.fromkeys(span.step for span in row.spans):
        spans = [span for span in row.spans if span.step == step]
        begin, end = spans[0].begin, spans[-1].begin + spans[-1].seconds
        yield {"ph": "X", "name": f"step {step}", "cat": "step", "ts": (begin - start) * 1e6, "dur": (end - begin) * 1e6, **whose}
        for span in spans:
            told = dict(zip(("micro_batch", "stage"), span.where, strict=False))
            yield {
                "ph": "X",
                "name": _title(span),
                "cat": span.part,
                "ts": (span.begin - start) * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"step": step, **told},
                **whose,
            }


def _title(span: Span) -> str:
    if span.where:
        return f"{span.part} {span.where[0]}"
    return "waits for other stages" if span.part == BACKWARD else span.part


def _name(kind: str, pid: int, tid: int | None, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, **({} if tid is None else {"tid": tid}), "args": {"name": name}}


def _accuracy(rows: Sequence[Row]) -> float:
    return max((row.accuracy for row in rows), default=0.0)


def _offset(here: Runtime) -> tuple[float, float]:
    """Return the seconds from this rank's clock to rank 0's, and by how many that may be wrong. Called by all ranks together."""
    found, told = (0.0, 0.0), torch.zeros(1, dtype=torch.float64)
    for rank in range(1, here.size):
        if here.first:
            for _ in range(_QUESTIONS):
                dist.recv(told, rank)
                told[0] = time.perf_counter()
                dist.send(told, rank)
        elif here.rank == rank:
            found = min((_asked(told) for _ in range(_QUESTIONS)), key=lambda answer: answer[1])
    return found


def _asked(told: torch.Tensor) -> tuple[float, float]:
    begun = time.perf_counter()
    dist.send(told, 0)
    dist.recv(told, 0)
    ended = time.perf_counter()
    return float(told) - (begun + ended) / 2, (ended - begun) / 2
