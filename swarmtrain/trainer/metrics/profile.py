"""A torch.profiler trace of some steps of some ranks, with a table of the operations that took longest, and a picture of a GPU's memory."""

from __future__ import annotations

import gzip
import logging
import shutil
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from swarmtrain.config.files import reason
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_LARGE = 64 * 2**20
"""Bytes of a trace from which on it is compressed."""
_ROWS = 40
"""Operations in the table."""
_ALLOCATIONS = 100_000
"""Allocations that are kept for the picture of memory: the last ones."""


class Profile:
    """Traces the steps that the config names; does nothing on other ranks or if it names none."""

    def __init__(self, here: Runtime) -> None:
        self._config = config = here.config.profiler
        chosen = config.profile_ranks is None or here.rank in config.profile_ranks
        self._count = config.profile_steps if chosen else 0
        self._warmup = min(config.profile_warmup_steps, config.profile_start_at_step)
        self._begins = config.profile_start_at_step - self._warmup
        whole = config.profiler_output or here.folder / "profile.json"
        self._output = whole if here.first else whole.with_name(f"{whole.name.partition('.')[0]}-rank-{here.rank}{''.join(whole.suffixes)}")
        self._on_gpu = here.device.type == "cuda"
        self._seen = 0
        self._profile: profile | None = None

    def before_step(self) -> None:
        """Start when the first traced step, or the first of those before it, is about to begin."""
        if self._count and self._seen == self._begins:
            self._profile = self._made()
            self._profile.start()
            if self._config.memory_snapshot and self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
            elif self._config.memory_snapshot:
                LOG.warning("profiler.memory_snapshot: there is no GPU here, and of a CPU's memory no snapshot can be had")

    def after_step(self) -> None:
        """Stop and write the trace when the last traced step is done."""
        self._seen += 1
        if self._profile:
            self._profile.step()
            if self._seen == self._begins + self._warmup + self._count:
                self.close()

    def close(self) -> None:
        """Write what has been traced, if it has not been: a run may end, or fail, in the middle."""
        if self._profile is None:
            return
        traced, self._profile = self._profile, None
        traced.stop()  # which calls _write, unless the last step has
        if self._config.memory_snapshot and self._on_gpu:
            path = self._output.with_name(f"memory-{self._output.name.partition('.')[0]}.pickle")
            self._output.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # torch's own is not typed
            torch.cuda.memory._record_memory_history(enabled=None)
            LOG.info("snapshot of memory: %s", path)

    def _made(self) -> profile:
        config = self._config
        return profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else []),
            schedule=schedule(wait=0, warmup=self._warmup, active=self._count, repeat=1),
            on_trace_ready=self._write,
            record_shapes=config.record_shapes,
            with_stack=config.with_stack,
            profile_memory=config.profile_memory,
        )

    def _write(self, traced: profile) -> None:
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(self._output))
            written = _compressed(self._output) if self._output.stat().st_size > _LARGE else self._output
            table = self._output.with_name(f"{self._output.name.partition('.')[0]}.txt")
            table.write_text(self._table(traced))
        except OSError as error:
            LOG.warning("%s: no trace, since it cannot be written: %s", self._output, reason(error))
        else:
            LOG.info("trace of %d steps: %s; operations by their time: %s", self._count, written, table)

    def _table(self, traced: profile) -> str:
        groups = traced.key_averages(group_by_input_shape=self._config.record_shapes, group_by_stack_n=5 if self._config.with_stack else 0)
        where = "cuda" if self._on_gpu else "cpu"
        return str(groups.table(sort_by=f"self_{where}_time_total", row_limit=_ROWS)) + "\n"


def _compressed(path: Path) -> Path:
    """Compress the file at `path`, unless it is, and return where it is then."""
    if path.suffix == ".gz":
        return path
    smaller = path.with_name(f"{path.name}.gz")
    with path.open("rb") as whole, gzip.open(smaller, "wb", compresslevel=5) as packed:
        shutil.copyfileobj(whole, packed)
    path.unlink()
    return smaller
