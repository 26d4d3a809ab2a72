"""torch.profiler trace of selected steps and ranks, with a table of the slowest operations and optionally a snapshot of GPU memory."""

from __future__ import annotations

import gzip
import logging
import shutil
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_COMPRESS_ABOVE_BYTES = 64 * 2**20
"""Size in bytes above which a trace is compressed."""
_TABLE_ROWS = 40
"""Number of operations in the table of the slowest operations."""
_MAX_RECORDED_ALLOCATIONS = 100_000
"""Maximum number of allocations in the memory snapshot; the most recent are kept."""


class TorchProfiler:
    """Profiles the steps that the config selects. A no-op on ranks that are not selected, or if no steps are selected."""

    def __init__(self, runtime: Runtime) -> None:
        self._config = config = runtime.config.profiler
        is_selected = config.profile_ranks is None or runtime.rank in config.profile_ranks
        self._active_steps = config.profile_steps if is_selected else 0
        self._warmup_steps = min(config.profile_warmup_steps, config.profile_start_at_step)
        self._start_step = config.profile_start_at_step - self._warmup_steps
        path = config.profiler_output or runtime.output_folder / "profile.json"
        self._trace_path = (
            path if runtime.is_rank_zero else path.with_name(f"{path.name.partition('.')[0]}-rank-{runtime.rank}{''.join(path.suffixes)}")
        )
        self._on_gpu = runtime.device.type == "cuda"
        self._steps_done = 0
        self._profiler: profile | None = None

    def start_trace_if_due(self) -> None:
        """Start the profiler if the next step is the first warmup step or, without warmup, the first traced step."""
        if self._active_steps and self._steps_done == self._start_step:
            self._profiler = self._create_profiler()
            self._profiler.start()
            if self._config.memory_snapshot and self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_MAX_RECORDED_ALLOCATIONS)
            elif self._config.memory_snapshot:
                LOG.warning("profiler.memory_snapshot: this rank has no GPU, and torch records snapshots only of GPU memory")

    def write_trace_if_due(self) -> None:
        """Stop the profiler and write the trace if the step was the last traced step."""
        self._steps_done += 1
        if self._profiler:
            self._profiler.step()
            if self._steps_done == self._start_step + self._warmup_steps + self._active_steps:
                self.close()

    def close(self) -> None:
        """Stop the profiler, and write the trace unless it is already written: a run may end or fail during the traced steps."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()  # calls _write_trace, unless the last traced step has already called it
        if self._config.memory_snapshot and self._on_gpu:
            path = self._trace_path.with_name(f"memory-{self._trace_path.name.partition('.')[0]}.pickle")
            self._trace_path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # not typed in torch
            torch.cuda.memory._record_memory_history(enabled=None)
            LOG.info("memory snapshot: %s", path)

    def _create_profiler(self) -> profile:
        config = self._config
        return profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else []),
            schedule=schedule(wait=0, warmup=self._warmup_steps, active=self._active_steps, repeat=1),
            on_trace_ready=self._write_trace,
            record_shapes=config.record_shapes,
            with_stack=config.with_stack,
            profile_memory=config.profile_memory,
        )

    def _write_trace(self, profiler: profile) -> None:
        try:
            self._trace_path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._trace_path))
            trace_path = _compress_file(self._trace_path) if self._trace_path.stat().st_size > _COMPRESS_ABOVE_BYTES else self._trace_path
            table_path = self._trace_path.with_name(f"{self._trace_path.name.partition('.')[0]}.txt")
            table_path.write_text(self._format_operator_table(profiler))
        except OSError as error:
            LOG.warning("%s: the trace cannot be written: %s", self._trace_path, describe_os_error(error))
        else:
            LOG.info("trace of %d steps: %s; operations by time: %s", self._active_steps, trace_path, table_path)

    def _format_operator_table(self, profiler: profile) -> str:
        groups = profiler.key_averages(
            group_by_input_shape=self._config.record_shapes, group_by_stack_n=5 if self._config.with_stack else 0
        )
        device_type = "cuda" if self._on_gpu else "cpu"
        return str(groups.table(sort_by=f"self_{device_type}_time_total", row_limit=_TABLE_ROWS)) + "\n"


def _compress_file(path: Path) -> Path:
    """Compress the file `path` with gzip, unless its name ends with .gz. Return its new path."""
    if path.suffix == ".gz":
        return path
    compressed_path = path.with_name(f"{path.name}.gz")
    with path.open("rb") as source, gzip.open(compressed_path, "wb", compresslevel=5) as target:
        shutil.copyfileobj(source, target)
    path.unlink()
    return compressed_path
