"""Measurement tools: samples of repeated measurements, measurements in turns, CPU time, wall time and peak memory of programs."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import ProcessError, SwarmtrainError

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "bench"
MIN_ROUNDS, MAX_ROUNDS = 9, 41
_TAIL_PROBABILITY = 0.025
_PEAK_MEMORY_SCRIPT = """
import resource, subprocess, sys

code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, end="")
sys.exit(code)
"""
SWARMTRAIN_ARGV = [str(Path(sys.executable).with_name("swarmtrain"))]


class BenchmarkUnavailableError(SwarmtrainError):
    """A benchmark, or its baseline, cannot run on this machine."""


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one quantity. The median is reported."""

    values: tuple[float, ...]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Sample:
        """Return a sample of `values`, which must not be empty."""
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest value of the sample."""
        return min(self.values), max(self.values)


@dataclass(frozen=True)
class BenchmarkRow:
    """One row of the results table. If the benchmark cannot run, `skip_reason` contains the reason."""

    name: str
    description: str
    unit: str = ""
    result: Sample | None = None
    baseline: Sample | None = None
    baseline_description: str = ""
    limit: float | None = None
    """The largest allowed median of `result`."""
    goal: float | None = None
    """Target ratio of `result` to `baseline`. The table shows it, and marks results that do not reach it."""
    note: str = ""
    skip_reason: str = ""


def print_progress(line: str) -> None:
    """Print the progress message `line` to stderr."""
    sys.stderr.write(f"  {line}\n")
    sys.stderr.flush()


def measure_in_turns(repeats: int, *measurements: Callable[[], float], warm_up: bool = True) -> list[Sample]:
    """Run `measurements` in turns, `repeats` times, and return one sample per measurement. `warm_up`: first run and discard one round."""
    if warm_up:
        for measure in measurements:
            measure()
    rounds = [[measure() for measure in measurements] for _ in range(repeats)]
    return [Sample.from_values(values) for values in zip(*rounds, strict=True)]


def measure_in_turns_for(seconds: float, *measurements: Callable[[], float]) -> list[Sample]:
    """Run `measurements` in turns for about `seconds`, in MIN_ROUNDS to MAX_ROUNDS rounds. Return one sample per measurement."""
    rounds: list[list[float]] = []
    deadline = time.monotonic() + seconds
    while len(rounds) < MIN_ROUNDS or (time.monotonic() < deadline and len(rounds) < MAX_ROUNDS):
        rounds.append([measure() for measure in measurements])
    return [Sample.from_values(values) for values in zip(*rounds, strict=True)]


def compute_median_confidence_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the true median of `ratios`; None if there are too few ratios.

    The interval is distribution-free: its bounds are order statistics, since the number of values below the true median follows the
    binomial distribution B(n, 0.5).
    """
    count, tail_probability, rank = len(ratios), 0.0, 0
    while (tail_probability := tail_probability + math.comb(count, rank) / 2**count) <= _TAIL_PROBABILITY:
        rank += 1
    ordered = sorted(ratios)
    return (ordered[rank - 1], ordered[count - rank]) if rank else None


def measure_cpu_seconds(argv: Sequence[str], env: Mapping[str, str] | None = None) -> float:
    """Run `argv` in the repository's root; return the CPU seconds, user and system, of it and its children. Raises ProcessError."""
    program = process.start_process(argv, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, resource_usage = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        raise ProcessError(process.format_command(argv, env), program.returncode, "")
    return resource_usage.ru_utime + resource_usage.ru_stime


def measure_peak_memory(argv: Sequence[str], *, input: str = "") -> float:
    """Run `argv` in the repository's root, with `input` on stdin; return the peak resident set size (RSS) in bytes.

    This is the maximum over the program and the descendants that it waited for.

    Raises ProcessError.
    """
    # A process inherits the peak memory of its parent, so a small process must start it.
    return int(process.run_command([sys.executable, "-c", _PEAK_MEMORY_SCRIPT, *argv], cwd=ROOT, input=input).rpartition("\n")[2]) * 1024.0


def measure_wall_seconds(argv: Sequence[str], env: Mapping[str, str] | None = None) -> float:
    """Run `argv` in the repository's root and return the wall time in seconds. Raises ProcessError."""
    started_at = time.monotonic()
    process.run_command(argv, env=env, cwd=ROOT)
    return time.monotonic() - started_at


def wait_until(is_done: Callable[[], bool], description: str, *, timeout: float = 180.0, interval: float = 0.5) -> None:
    """Call `is_done` every `interval` seconds until it returns True.

    Raises BenchmarkUnavailableError with `description` after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not is_done():
        if time.monotonic() > deadline:
            raise BenchmarkUnavailableError(f"{description}: not within {timeout:.0f} s")
        time.sleep(interval)


def format_time_per_item(seconds_by_size: Mapping[int, float]) -> Iterator[str]:
    """Yield the time per item, in ms, at each size: `250: 0.61 ms`."""
    for size, seconds in seconds_by_size.items():
        yield f"{size}: {seconds / size * 1e3:.2f} ms"
