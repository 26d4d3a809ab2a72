"""A torch.profiler trace of some steps of rank 0."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")


class Profile:
    """Traces the steps that the config names; does nothing on other ranks or if it names none."""

    def __init__(self, here: Runtime) -> None:
        config = here.config.profiler
        self._first = config.profile_start_at_step
        self._count = config.profile_steps if here.first else 0
        folder = here.config.logger.log_dir or here.config.trainer.save_dir or Path.cwd()
        self._output = config.profiler_output or folder / "profile.json"
        self._seen = 0
        self._profile: profile | None = None

    def before_step(self) -> None:
        """Start when the first traced step is about to begin."""
        if self._count and self._seen == self._first:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
            self._profile = profile(activities=activities)
            self._profile.start()

    def after_step(self) -> None:
        """Stop and write the trace when the last traced step is done."""
        self._seen += 1
        if self._profile and self._seen == self._first + self._count:
            self._profile.stop()
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._output))
            self._profile = None
            LOG.info("trace of %d steps: %s", self._count, self._output)
