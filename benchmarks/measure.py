"""What a benchmark measures with: figures of several runs, two things in turns, the CPU time of a program."""

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
LEAST, MOST = 9, 41
_CHANCE = 0.025
_METER = """
import resource, subprocess, sys

code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, end="")
sys.exit(code)
"""
SWARMTRAIN = [str(Path(sys.executable).with_name("swarmtrain"))]


class Unavailable(SwarmtrainError):
    """A benchmark, or what it is compared with, cannot run on this machine."""


@dataclass(frozen=True)
class Sample:
    """The same thing measured several times. The median is what is quoted."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Return the sample of these values, of which there is at least one."""
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest."""
        return min(self.values), max(self.values)


@dataclass(frozen=True)
class Row:
    """One line of the table. A row without figures says in `why_not` why there are none."""

    name: str
    what: str
    unit: str = ""
    ours: Sample | None = None
    other: Sample | None = None
    other_is: str = ""
    limit: float | None = None
    """The most that `ours` may be."""
    goal: float | None = None
    """What `ours` in terms of `other` should reach: shown, and said when it is not reached."""
    note: str = ""
    why_not: str = ""


def say(line: str) -> None:
    """Tell how it goes, on stderr."""
    sys.stderr.write(f"  {line}\n")
    sys.stderr.flush()


def in_turns(runs: int, *things: Callable[[], float], warm_up: bool = True) -> list[Sample]:
    """Measure `things` one after the other, `runs` times over; with `warm_up` once more before, uncounted."""
    if warm_up:
        for thing in things:
            thing()
    rounds = [[thing() for thing in things] for _ in range(runs)]
    return [Sample.of(values) for values in zip(*rounds, strict=True)]


def in_turns_for(seconds: float, *things: Callable[[], float]) -> list[Sample]:
    """Measure `things` in turns for about `seconds`, `LEAST` times over at least and `MOST` at most."""
    rounds: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(rounds) < LEAST or (time.monotonic() < end and len(rounds) < MOST):
        rounds.append([thing() for thing in things])
    return [Sample.of(values) for values in zip(*rounds, strict=True)]


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return between which of `ratios` the median of all that there might have been lies, with a chance of 95 %; None if too few.

    It lies below the k-th smallest when fewer than k of n fell below it, as of n tossed coins fewer than k fall on one side.
    """
    count, below, rank = len(ratios), 0.0, 0
    while (below := below + math.comb(count, rank) / 2**count) <= _CHANCE:
        rank += 1
    ordered = sorted(ratios)
    return (ordered[rank - 1], ordered[count - rank]) if rank else None


def cpu_seconds(argv: Sequence[str], env: Mapping[str, str] | None = None) -> float:
    """Run `argv` in the repository's root; return the CPU time, user and system, of it and its children. Raises ProcessError."""
    program = process.start(argv, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        raise ProcessError(process.show(argv, env), program.returncode, "")
    return used.ru_utime + used.ru_stime


def peak_memory(argv: Sequence[str], *, input: str = "") -> float:
    """Run `argv` in the repository's root, with `input`; return the most bytes that it, or a process that it waited for, had at once.

    Raises ProcessError.
    """
    # A process inherits the peak of the one that forked it, which should be small.
    return int(process.run([sys.executable, "-c", _METER, *argv], cwd=ROOT, input=input).rpartition("\n")[2]) * 1024.0


def wall_seconds(argv: Sequence[str], env: Mapping[str, str] | None = None) -> float:
    """Run `argv` in the repository's root and return how long it took. Raises ProcessError."""
    begun = time.monotonic()
    process.run(argv, env=env, cwd=ROOT)
    return time.monotonic() - begun


def until(done: Callable[[], bool], what: str, *, seconds: float = 180.0, every: float = 0.5) -> None:
    """Return when `done`. Raises Unavailable if it is not within `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise Unavailable(f"{what}: not within {seconds:.0f} s")
        time.sleep(every)


def growth(values: Mapping[int, float]) -> Iterator[str]:
    """Say what one of many costs at each size: `250: 0.61 ms`."""
    for size, seconds in values.items():
        yield f"{size}: {seconds / size * 1e3:.2f} ms"
