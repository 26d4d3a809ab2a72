"""Runs of the quickstart's data on a lab, and the time that a step takes in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence

from benchmarks.measurement import ROOT, SWARMTRAIN_ARGV
from benchmarks.run_startup import IMAGE
from swarmtrain import process
from swarmtrain.lab import Lab

_WINDOW_STEPS = 50
"""The throughput in a run's metrics is the mean of this many steps, or of all steps if there are fewer."""
_TIMEOUT_SECONDS = 1200.0


def measure_step_seconds(
    lab: Lab,
    run: str,
    options: Sequence[str],
    *,
    tokens_per_step: int,
    steps: int,
    warmup_steps: int,
    while_training: Callable[[], None] | None = None,
) -> float:
    """Run examples/quickstart.yml with `options` on `lab`, and return the mean seconds of `steps` steps that follow `warmup_steps`.

    `steps` is at most 50 minus `warmup_steps`, or a multiple of 50. `while_training`: called after the deploy, which then does not wait for
    the end of the run. Raises ProcessError.
    """
    environment = {**os.environ, **lab.build_client_environment()}
    total = steps + warmup_steps
    argv = [*SWARMTRAIN_ARGV, "deploy", "examples/quickstart.yml", "--name", run, *build_options(run, total, options)]
    try:
        if while_training:
            process.run_command([*argv, "--detach"], cwd=ROOT, env=environment, timeout=_TIMEOUT_SECONDS)
            while_training()
            process.run_command([*SWARMTRAIN_ARGV, "logs", run, "--follow"], cwd=ROOT, env=environment, timeout=_TIMEOUT_SECONDS)
        else:
            process.run_command(argv, cwd=ROOT, env=environment, timeout=_TIMEOUT_SECONDS)
        lines = map(json.loads, (lab.shared_disk / run / "metrics.jsonl").read_text().splitlines())
        elapsed: dict[int, float] = {
            line["step"]: min(line["step"], _WINDOW_STEPS) * tokens_per_step / line["tokens_per_second"]
            for line in lines
            if "learning_rate" in line
        }
    finally:
        process.run_command([*SWARMTRAIN_ARGV, "down", run, "--yes"], env=environment)
        shutil.rmtree(lab.shared_disk / run, ignore_errors=True)
    if total <= _WINDOW_STEPS:
        return (elapsed[total] - elapsed[warmup_steps]) / steps
    return sum(elapsed[step] for step in range(total, warmup_steps, -_WINDOW_STEPS)) / steps


def build_options(run: str, steps: int, options: Sequence[str]) -> list[str]:
    """Return the command-line options with which examples/quickstart.yml trains `steps` steps on a lab, with `options` on top."""
    settings = [
        f"runner.docker_config.docker_container={IMAGE}",
        f"trainer.save_dir=runs/{run}",
        f"trainer.train_iterations={steps}",
        "trainer.save_interval=null",
        "trainer.eval_interval=null",
        "logger.log_interval=1",
        *options,
    ]
    return [word for each in settings for word in ("-o", each)]
