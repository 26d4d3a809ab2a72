"""Probe of training steps: each rank of this node trains the config's model alone, all of them at the same time. Standard library only."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from swarmtrain.entrypoint.preflight_checks import compute_threads_per_rank
from swarmtrain.process import start_process
from swarmtrain.protocol import NodeEnv

_START_SECONDS = 240.0
"""Seconds for the import of torch, the creation of the model, its compilation and the first steps."""


def measure_step_times(env: NodeEnv, seconds: float) -> dict[str, Any]:
    """Measure for about `seconds`, and return the results of swarmtrain.trainer.speed.bench: those of the slowest rank, or an error."""
    request = json.dumps({"config": env.config, "seconds": seconds}).encode()
    processes = [_start_rank(env, local_rank) for local_rank in range(env.slots)]
    try:
        for process in processes:
            if process.stdin is not None:
                process.stdin.write(request)
                process.stdin.close()
                process.stdin = None  # communicate() would flush it
        results = [_read_result(process, _START_SECONDS + seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(results, key=lambda result: ("error" in result, result.get("micro_batch_seconds", 0.0)))


def _start_rank(env: NodeEnv, local_rank: int) -> subprocess.Popen[bytes]:
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": str(local_rank),
        "OMP_NUM_THREADS": str(compute_threads_per_rank(env.slots)),
    }
    argv = [sys.executable, "-m", "swarmtrain.trainer", "step-time"]
    pipe = subprocess.PIPE
    return start_process(argv, env=variables, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, die_with_parent=True)


def _read_result(process: subprocess.Popen[bytes], timeout: float) -> dict[str, Any]:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {timeout:g} s"}
    return _parse_result(output.decode(errors="replace").strip().splitlines(), process.returncode)


def _parse_result(lines: Sequence[str], exit_code: int) -> dict[str, Any]:
    for line in reversed(lines):  # the trainer also logs
        with contextlib.suppress(ValueError):
            if isinstance(result := json.loads(line), dict):
                return {"error": str(result["error"]["message"])} if isinstance(result.get("error"), dict) else result
    return {"error": lines[-1] if lines else f"exit code {exit_code}"}
