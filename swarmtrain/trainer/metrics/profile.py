"""A torch.profiler trace of some steps, on the ranks that the config names."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_OPERATIONS = 40
_ALLOCATIONS = 200_000
"""Allocations and releases that a snapshot tells of at most: the newest."""


class Profile:
    """Traces the steps that the config names; does nothing on other ranks or if it names none."""

    def __init__(self, here: Runtime) -> None:
        self._config = config = here.config.profiler
        self._on_gpu = here.device.type == "cuda"
        folder = here.config.logger.log_dir or here.config.trainer.save_dir or Path.cwd()
        output = config.profiler_output or folder / "profile.json"
        self._output = output.with_name(f"{output.stem}-rank-{here.rank}{output.suffix}") if here.rank else output
        self._warmup = min(config.profile_warmup, config.profile_start_at_step)
        self._begins = config.profile_start_at_step - self._warmup
        self._left = config.profile_steps + self._warmup if config.profile_steps and here.rank in config.profile_ranks else 0
        self._seen = 0
        self._profile: profile | None = None

    def before_step(self) -> None:
        """Start when the first step that the profiler is to see is about to begin."""
        if self._left and self._seen == self._begins:
            self._profile = self._made()
            self._profile.start()
            if self._config.memory_snapshot and self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)

    def after_step(self) -> None:
        """Stop, and write what was seen, when the last traced step is done."""
        self._seen += 1
        if self._profile is None:
            return
        self._left -= 1
        if self._left:
            self._profile.step()
            return
        made, self._profile = self._profile, None
        made.stop()
        self._write(made)

    def _made(self) -> profile:
        config = self._config
        return profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else []),
            schedule=schedule(wait=0, warmup=self._warmup, active=config.profile_steps, repeat=1) if self._warmup else None,
            record_shapes=config.record_shapes,
            with_stack=config.with_stack,
            profile_memory=config.profile_memory,
        )

    def _write(self, made: profile) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        made.export_chrome_trace(str(self._output))
        device = "cuda" if self._on_gpu else "cpu"
        table = made.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=_OPERATIONS)
        self._output.with_suffix(".txt").write_text(table)
        LOG.info("trace of %d steps: %s", self._config.profile_steps, self._output)
        if self._config.memory_snapshot:
            self._write_snapshot()

    def _write_snapshot(self) -> None:
        if not self._on_gpu:
            LOG.warning("profiler.memory_snapshot: there is none of a CPU")
            return
        torch.cuda.memory._dump_snapshot(str(self._output.with_suffix(".pickle")))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
