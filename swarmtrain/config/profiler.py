"""`profiler`: a trace of some steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from swarmtrain.config.base import Section


class ProfilerConfig(Section):
    """A torch.profiler trace of some ranks, to be opened in Perfetto or chrome://tracing."""

    profile_steps: int = Field(0, ge=0, description="Steps to trace. 0: off.")
    profile_start_at_step: int = Field(10, ge=0, description="First traced step, counted from where this world starts.")
    profile_warmup_steps: int = Field(
        1, ge=0, description="Steps before it in which the profiler runs and keeps nothing: its own start would show in the trace."
    )
    profiler_output: Path | None = Field(
        None,
        description="File to write; that of rank 3 has -rank-3 in its name, and a table of operations goes beside it. "
        "null: profile.json in log_dir.",
    )
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field((0,), description="Ranks to trace. null: all.")
    record_shapes: bool = Field(False, description="Keep the shapes of what operations are given.")
    with_stack: bool = Field(False, description="Keep where in the source operations are called.")
    profile_memory: bool = Field(False, description="Keep what operations allocate and free.")
    memory_snapshot: bool = Field(
        False,
        description="Write what is in the GPU's memory after the traced steps, and every allocation in them, for pytorch.org/memory_viz.",
    )
    timeline_steps: int = Field(
        0, ge=0, description="Steps of which timeline.json in log_dir shows what every rank does when, micro batch by micro batch. 0: off."
    )
    timeline_start_at_step: int = Field(10, ge=0, description="The first of them, counted from where this world starts.")
