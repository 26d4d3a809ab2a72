"""Loops that are measured by turns: processes that stand still, and take some steps when it is their turn."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from benchmarks.loops import pace
from benchmarks.measure import BUILD, ROOT, Unavailable
from swarmtrain import process


@dataclass(frozen=True)
class Loop:
    """A program of benchmarks/loops, and how it is started."""

    name: str
    config: str
    """Ours, as JSON."""
    ranks: int = 1
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


class Racer:
    """A loop that runs. As a context manager it ends with the body."""

    def __init__(self, loop: Loop) -> None:
        self._log = BUILD / f"{loop.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        self._ranks = [_Rank(loop, environment, self._log) for environment in _environments(loop)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for rank in self._ranks:
            rank.end()

    def seconds(self, steps: int) -> float:
        """Let all ranks take `steps` steps and return the CPU seconds of all of them for one. Raises Unavailable if the loop has ended."""
        for rank in self._ranks:
            rank.go(steps)
        answers = [rank.answer() for rank in self._ranks]
        if "" in answers:
            last = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise Unavailable(f"{self._log.stem} ended: {last[-1]}", hint=f"less {self._log}")
        return sum(float(answer) for answer in answers) / steps


class _Rank:
    def __init__(self, loop: Loop, environment: Mapping[str, str], log: Path) -> None:
        (orders, self._orders), (self._answers, answers) = os.pipe(), os.pipe()
        argv = [loop.python, "-m", f"benchmarks.loops.{loop.name}", loop.config]
        env = {**environment, pace.VARIABLE: f"{orders} {answers}", "PYTHONPATH": str(ROOT)}
        with log.open("ab") as output:
            self._program = process.start(argv, env=env, cwd=ROOT, stdout=output, stderr=output, pass_fds=(orders, answers))
        os.close(orders)
        os.close(answers)
        self._told: IO[str] = os.fdopen(self._answers)

    def go(self, steps: int) -> None:
        os.write(self._orders, f"{steps}\n".encode())

    def answer(self) -> str:
        return self._told.readline()

    def end(self) -> None:
        os.close(self._orders)
        try:
            self._program.wait(10)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
        self._told.close()


def _environments(loop: Loop) -> Sequence[Mapping[str, str]]:
    alone = {**loop.environment, "OMP_NUM_THREADS": "1"}
    if loop.ranks == 1:
        return [alone]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    same = {"WORLD_SIZE": str(loop.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**alone, **same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(loop.ranks)]
