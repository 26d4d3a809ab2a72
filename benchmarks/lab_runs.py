"""Runs of the quickstart's data on a lab: the time that a step takes in them, and the bytes that nodes send."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.measurement import ROOT, SWARMTRAIN_ARGV
from benchmarks.run_startup import IMAGE
from swarmtrain import process
from swarmtrain.lab import Lab

_WINDOW_STEPS = 50
"""The throughput in a run's metrics is the mean of this many steps, or of all steps if there are fewer."""
_TIMEOUT_SECONDS = 1200.0
_POLL_SECONDS = 0.05
_SENT_BYTES_COLUMN = 8


@dataclass(frozen=True)
class StepCost:
    """What a step of a run costs: means over its measured steps."""

    seconds: float
    sent_bytes: float
    """Bytes that a node sends over its link, including headers of all layers. Mean of the nodes."""


def measure_step_cost(
    lab: Lab,
    run: str,
    options: Sequence[str],
    *,
    tokens_per_step: int,
    steps: int,
    warmup_steps: int,
    while_training: Callable[[], None] | None = None,
) -> StepCost:
    """Run examples/quickstart.yml with `options` on `lab`, and return the cost of `steps` steps that follow `warmup_steps`.

    `steps` is at most 50 minus `warmup_steps`, or a multiple of 50. Bytes are those of all these steps but the last, after which a run may
    send more. `while_training`: called after the deploy has begun. Raises ProcessError.
    """
    environment = {**os.environ, **lab.build_client_environment()}
    total, metrics_file = steps + warmup_steps, lab.shared_disk / run / "metrics.jsonl"
    pids = [node.pid for node in lab.get_status() if node.pid]
    argv = [*SWARMTRAIN_ARGV, "deploy", "examples/quickstart.yml", "--name", run, *build_options(run, total, options)]
    with ThreadPoolExecutor(1) as pool:
        deploy = pool.submit(process.run_command, argv, cwd=ROOT, env=environment, timeout=_TIMEOUT_SECONDS)
        try:
            if while_training:
                while_training()
            first_bytes, last_bytes = (_read_sent_bytes_at(step, metrics_file, pids, deploy) for step in (warmup_steps, total - 1))
            deploy.result()
            elapsed = {
                line["step"]: min(line["step"], _WINDOW_STEPS) * tokens_per_step / line["tokens_per_second"]
                for line in map(json.loads, metrics_file.read_text().splitlines())
                if "learning_rate" in line
            }
        finally:  # `down` also ends a deploy that still follows the run
            process.run_command([*SWARMTRAIN_ARGV, "down", run, "--yes"], env=environment)
            shutil.rmtree(lab.shared_disk / run, ignore_errors=True)
    if total <= _WINDOW_STEPS:
        seconds = elapsed[total] - elapsed[warmup_steps]
    else:
        seconds = sum(elapsed[step] for step in range(total, warmup_steps, -_WINDOW_STEPS))
    return StepCost(seconds / steps, (last_bytes - first_bytes) / (steps - 1))


def _read_sent_bytes_at(step: int, metrics_file: Path, pids: Sequence[int], deploy: Future[str]) -> float:
    """Wait until `step` is in the metrics or the run has ended, and return the bytes that the machines `pids` have sent, on average."""
    while not deploy.done() and not _has_reached(metrics_file, step):
        time.sleep(_POLL_SECONDS)
    return fmean(_read_sent_bytes(pid) for pid in pids)


def _has_reached(metrics_file: Path, step: int) -> bool:
    lines = metrics_file.read_text().split("\n")[:-1] if metrics_file.exists() else []  # what follows the last newline is not complete
    return bool(lines) and json.loads(lines[-1])["step"] >= step


def _read_sent_bytes(pid: int) -> int:
    """Return the bytes that eth0 has sent, in the network namespace of the process `pid`."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    counters = next(line for line in lines if line.lstrip().startswith("eth0:")).partition(":")[2].split()
    return int(counters[_SENT_BYTES_COLUMN])


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
