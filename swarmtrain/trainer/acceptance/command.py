"""Run the stages of the acceptance run, each in a process of its own, and print their rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from swarmtrain.errors import EXIT_ERROR, EXIT_OK, SwarmtrainError
from swarmtrain.trainer.acceptance.checks import launched_run
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.stages import STAGES, Stage, StageContext, run_stage
from swarmtrain.trainer.acceptance.worker import kill_workers, run_worker
from swarmtrain.trainer.cli_exit import handle_cli_errors

_MIN_STAGE_SECONDS = 15.0
# Empty at first, so that the times of compilation are comparable. XDG_STATE_HOME: the folders of local runs.
_CACHE_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_STATE_HOME": "state"}
_MARKS = {Outcome.passed: "ok", Outcome.failed: "FAILED", Outcome.missed: "missed", Outcome.measured: "", Outcome.skipped: "skipped"}


@handle_cli_errors
def main(request: dict[str, Any]) -> int:
    """Run the stages that `request` selects, and print each row at once: as text, or as a JSON line and, on stderr, as text.

    The request has `device` (auto, cuda or cpu), `stages` (names; empty: all), `seconds` (time limit of the whole run), and `json`.
    Return 1 if a check failed, else 0; a missed goal is not a failure.

    Raises SwarmtrainError if torch cannot use the GPU that is required or that the machine seems to have, or if no stage has one of the
    names.
    """
    context_values = _detect_device(request["device"])
    stages = _select_stages(request["stages"])
    deadline = time.monotonic() + StageContext(folder="", **context_values).scale_limit(request["seconds"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that everything that was started is stopped
    with tempfile.TemporaryDirectory(prefix="swarmtrain-acceptance-") as folder:
        acceptance_run = _AcceptanceRun(Path(folder), deadline, context_values, as_json=request["json"])
        failed_count = sum(row.outcome is Outcome.failed for row in acceptance_run.run_stages(stages))
    sys.stderr.write(f"{failed_count} failed\n" if failed_count else "no check failed\n")
    return EXIT_ERROR if failed_count else EXIT_OK


def _detect_device(requested: str) -> dict[str, Any]:
    gpu_count = 0 if requested == "cpu" else torch.cuda.device_count()
    expects_gpu = requested == "cuda" or (requested == "auto" and shutil.which("nvidia-smi") is not None)
    if expects_gpu and not gpu_count:
        raise SwarmtrainError(
            "torch finds no CUDA device" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA",
            place="this machine",
            hint="check the driver with nvidia-smi; swarmtrain doctor --train --device cpu runs the same checks without a GPU",
        )
    return {"device_type": "cuda" if gpu_count else "cpu", "gpu_count": gpu_count}


def _select_stages(names: list[str]) -> list[Stage]:
    known_names = [stage.name for stage in STAGES]
    if unknown := [name for name in names if name not in known_names]:
        raise SwarmtrainError(f"no such stage: {', '.join(unknown)}", place="--stage", hint=f"the stages are {', '.join(known_names)}")
    return [stage for stage in STAGES if stage.name in names or not names]


class _AcceptanceRun:
    """Runs stages on one machine until `deadline`, and writes their rows to stdout. Their files are in `folder`."""

    def __init__(self, folder: Path, deadline: float, context_values: Mapping[str, Any], *, as_json: bool) -> None:
        self._folder, self._deadline, self._context_values, self._as_json = folder, deadline, context_values, as_json
        self._lock = threading.Lock()

    def run_stages(self, stages: Sequence[Stage]) -> list[Row]:
        """Run `stages` in their order, and return all rows. On a GPU, stages that are not timed run at the same time."""
        groups: list[list[Stage]] = []
        for stage in stages:
            joins_group = groups and not stage.is_timed and not groups[-1][0].is_timed and self._context_values["device_type"] == "cuda"
            if joins_group:
                groups[-1].append(stage)
            else:
                groups.append([stage])
        rows: list[Row] = []
        for group in groups:
            for stage in group:
                sys.stderr.write(f"{stage.name}: {stage.description}; at most {self._find_limit(stage):.0f} s\n")
            threads = max(1, len(os.sched_getaffinity(0)) // len(group))
            with ThreadPoolExecutor(len(group)) as pool:
                try:
                    rows += chain.from_iterable(pool.map(partial(self._run_stage, threads), group))
                except BaseException:
                    kill_workers()  # else the pool would wait for the end of their stages
                    raise
                finally:
                    launched_run.remove_run(self._build_environment(threads))
        return rows

    def _run_stage(self, threads: int, stage: Stage) -> list[Row]:
        start_time = time.monotonic()

        def write_row(row: Row) -> None:
            seconds = round(time.monotonic() - start_time, 1)
            with self._lock:
                if self._as_json:
                    sys.stdout.write(json.dumps({"stage": stage.name, "at_seconds": seconds, **asdict(row)}) + "\n")
                    sys.stdout.flush()
                (sys.stderr if self._as_json else sys.stdout).write(_format_row(stage.name, row) + "\n")

        remaining_seconds = self._deadline - start_time
        if remaining_seconds < _MIN_STAGE_SECONDS:
            row = Row(stage.name, Outcome.skipped, reason="no time left")
            write_row(row)
            return [row]
        context = StageContext(folder=str(self._folder / stage.name), **self._context_values)
        Path(context.folder).mkdir()
        arguments = {"name": stage.name, "context": asdict(context)}
        rows = []
        for row in run_worker(
            run_stage, arguments, timeout=min(self._find_limit(stage), remaining_seconds), env=self._build_environment(threads)
        ):
            rows.append(row)
            write_row(row)
        return rows

    def _find_limit(self, stage: Stage) -> float:
        return StageContext(folder="", **self._context_values).scale_limit(stage.gpu_seconds)

    def _build_environment(self, threads: int) -> dict[str, str]:
        """Return the environment variables of processes that may use `threads` threads."""
        return {
            **{variable: str(self._folder / name) for variable, name in _CACHE_FOLDERS.items()},
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            **({"CUDA_VISIBLE_DEVICES": ""} if self._context_values["device_type"] == "cpu" else {}),
        }


def _format_row(stage_name: str, row: Row) -> str:
    text = f"{_MARKS[row.outcome]:8}{f'{stage_name}: {row.name}':52}{row.format_values()}".rstrip()
    return "\n".join([text, *(f"{'':8}{line}" for line in row.reason.splitlines())])
