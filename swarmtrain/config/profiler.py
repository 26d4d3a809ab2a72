"""`profiler`: a trace of some steps."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from swarmtrain.config.base import Section


class ProfilerConfig(Section):
    """A torch.profiler trace of rank 0, to be opened in Perfetto or chrome://tracing."""

    profile_steps: int = Field(0, ge=0, description="Steps to trace. 0: off.")
    profile_start_at_step: int = Field(10, ge=0, description="First traced step, counted from where this world starts.")
    profiler_output: Path | None = Field(None, description="File to write. null: profile.json in log_dir.")
