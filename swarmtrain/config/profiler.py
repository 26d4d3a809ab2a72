"""`profiler`: a trace of some steps."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from swarmtrain.config.base import Section


class ProfilerConfig(Section):
    """A torch.profiler trace of some ranks, to be opened in Perfetto or chrome://tracing, and a table of what took longest."""

    profile_steps: int = Field(0, ge=0, description="Steps to trace. 0: off.")
    profile_start_at_step: int = Field(10, ge=0, description="First traced step, counted from where this world starts.")
    profile_warmup: int = Field(1, ge=0, description="Steps before it in which the profiler runs already, and what it sees is thrown away.")
    profile_ranks: list[int] = Field([0], description="Ranks that are traced.")
    profiler_output: Path | None = Field(
        None,
        description="File to write; of rank 3 its name ends in -rank-3, and the table is beside it, .txt. null: profile.json in log_dir.",
    )
    record_shapes: bool = Field(False, description="Trace the shapes of what operations are given.")
    with_stack: bool = Field(False, description="Trace the lines of Python that operations come from. Slow.")
    profile_memory: bool = Field(False, description="Trace what is allocated and freed.")
    memory_snapshot: bool = Field(
        False, description="Write who holds which memory of a GPU after these steps, for pytorch.org/memory_viz: .pickle beside the trace."
    )
