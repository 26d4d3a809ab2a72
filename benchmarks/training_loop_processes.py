"""Training loops that are measured in turns: each runs in its own processes, which run steps only on request."""

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

from benchmarks.loops import step_control
from benchmarks.measurement import BUILD, ROOT, BenchmarkUnavailableError
from swarmtrain import process


@dataclass(frozen=True)
class LoopProgram:
    """A program in benchmarks/loops, with its config, Python interpreter, environment variables and number of ranks."""

    name: str
    config: str
    """A swarmtrain config as JSON."""
    ranks: int = 1
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT
    """The checkout whose program and packages run."""


class SteppedLoop:
    """Runs a training loop that waits before each step for a request. As a context manager, stops the loop when the body exits."""

    def __init__(self, loop_program: LoopProgram) -> None:
        self._log = BUILD / f"{loop_program.name}-{loop_program.root.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        self._ranks = [_LoopRank(loop_program, environment, self._log) for environment in _build_environments(loop_program)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for rank in self._ranks:
            rank.stop()

    def measure_step_seconds(self, steps: int) -> float:
        """Run `steps` steps on all ranks, and return the CPU seconds per step, summed over ranks.

        Raises BenchmarkUnavailableError if the loop has ended.
        """
        for rank in self._ranks:
            rank.request_steps(steps)
        answers = [rank.read_answer() for rank in self._ranks]
        if "" in answers:
            log_lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise BenchmarkUnavailableError(f"{self._log.stem} ended: {log_lines[-1]}", hint=f"less {self._log}")
        return sum(float(answer) for answer in answers) / steps


class _LoopRank:
    def __init__(self, loop_program: LoopProgram, environment: Mapping[str, str], log: Path) -> None:
        (request_end, self._request_pipe), (self._answer_pipe, answer_end) = os.pipe(), os.pipe()
        argv = [loop_program.python, "-m", f"benchmarks.loops.{loop_program.name}", loop_program.config]
        env = {**environment, step_control.PIPES_VARIABLE: f"{request_end} {answer_end}", "PYTHONPATH": str(loop_program.root)}
        with log.open("ab") as output:
            self._program = process.start_process(
                argv, env=env, cwd=loop_program.root, stdout=output, stderr=output, pass_fds=(request_end, answer_end)
            )
        os.close(request_end)
        os.close(answer_end)
        self._answer_file: IO[str] = os.fdopen(self._answer_pipe)

    def request_steps(self, steps: int) -> None:
        os.write(self._request_pipe, f"{steps}\n".encode())

    def read_answer(self) -> str:
        return self._answer_file.readline()

    def stop(self) -> None:
        os.close(self._request_pipe)
        try:
            self._program.wait(10)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
        self._answer_file.close()


def _build_environments(loop_program: LoopProgram) -> Sequence[Mapping[str, str]]:
    single_rank = {**loop_program.environment, "OMP_NUM_THREADS": "1"}
    if loop_program.ranks == 1:
        return [single_rank]
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = str(free_socket.getsockname()[1])
    rendezvous = {"WORLD_SIZE": str(loop_program.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**single_rank, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(loop_program.ranks)]
