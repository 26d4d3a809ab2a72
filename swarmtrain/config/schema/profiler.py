"""`profiler`: torch.profiler traces and timelines of some steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from swarmtrain.config.schema.section import Section


class ProfilerConfig(Section):
    """A torch.profiler trace of some ranks, for Perfetto or chrome://tracing."""

    profile_steps: int = Field(0, ge=0, description="Number of steps to trace. 0: off.")
    profile_start_at_step: int = Field(10, ge=0, description="First traced step, counted from the start of the current world (restart).")
    profile_warmup_steps: int = Field(
        1, ge=0, description="Steps before it in which the profiler runs without recording, to keep its own startup out of the trace."
    )
    profiler_output: Path | None = Field(
        None,
        description="Trace file. Rank 3's name has -rank-3, and a table of operations is written next to it. null: "
        "profile.json in log_dir.",
    )
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field((0,), description="Ranks to trace. null: all.")
    record_shapes: bool = Field(False, description="Record the input shapes of operations.")
    with_stack: bool = Field(False, description="Record the source locations of operations.")
    profile_memory: bool = Field(False, description="Record allocations and frees of operations.")
    memory_snapshot: bool = Field(
        False,
        description="Write a GPU memory snapshot with every allocation of the traced steps, for pytorch.org/memory_viz.",
    )
    timeline_steps: int = Field(
        0, ge=0, description="Number of steps in timeline.json in log_dir, which shows the work of every rank by micro batch. 0: off."
    )
    timeline_start_at_step: int = Field(
        10, ge=0, description="First step of the timeline, counted from the start of the current world (restart)."
    )
