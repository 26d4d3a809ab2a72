"""Run trainer commands in a subprocess, since they need torch or numpy: `python -m swarmtrain.trainer COMMAND`, on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from swarmtrain import process
from swarmtrain.errors import SwarmtrainError
from swarmtrain.protocol.distributed_env import LOOPBACK, reserve_port

_TIMEOUT_SECONDS = 3600.0
_EXIT_GRACE_SECONDS, _POLL_SECONDS = 5.0, 0.05
# These commands need no GPU, and GPU detection takes 1 s.
_CPU_ONLY_ENV = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def query_trainer(command: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run the trainer's `command` with `request` as its input, and return its JSON response.

    Raises SwarmtrainError if torch is not installed, or if the response contains an error.
    """
    argv = _build_trainer_command(command)
    response: dict[str, Any] = json.loads(process.run_command(argv, env=_CPU_ONLY_ENV, input=json.dumps(request), timeout=_TIMEOUT_SECONDS))
    if "error" in response:
        raise SwarmtrainError(response["error"]["message"], place=response["error"]["place"], hint=response["error"]["hint"])
    return response


def exec_trainer(
    command: str, subcommand: str, options: Mapping[str, Any], positional_arguments: Sequence[str] = (), *, required_package: str = "numpy"
) -> NoReturn:
    """Replace this process by `subcommand` of the trainer's `command`, which inherits the terminal and determines the exit code.

    Raises SwarmtrainError if `required_package` is not installed.
    """
    process.exec_command(
        [*_build_trainer_command(command, required_package), subcommand, json.dumps(options), *positional_arguments],
        env={**os.environ, **_CPU_ONLY_ENV},
    )


def run_trainer_ranks(command: str, request: Mapping[str, Any], ranks: int = 1) -> int:
    """Run the trainer's `command` on `ranks` ranks of this machine. Return the exit code of the first rank that failed, else 0.

    The ranks use the machine's GPUs, if any. Rank 0 is attached to the terminal; the stderr of another rank is printed only if that
    rank failed first. A single rank replaces this process. Raises SwarmtrainError if torch is not installed.
    """
    argv = _build_trainer_command(command)
    if ranks == 1:
        process.exec_command(argv, env=os.environ, stdin=_write_input_file(request))
    port = reserve_port()
    rendezvous_env = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    shared_env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **rendezvous_env}
    stderr_files = [None, *(tempfile.TemporaryFile() for _ in range(1, ranks))]  # noqa: SIM115  # deleted when this process ends
    children = [
        process.start_process(
            argv,
            env={**shared_env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=_write_input_file(request),
            stderr=stderr_file,
            die_with_parent=True,
        )
        for rank, stderr_file in enumerate(stderr_files)
    ]
    failed_rank = _wait_for_first_failure(children)
    port.close()
    if failed_rank is not None and (stderr_file := stderr_files[failed_rank]) is not None:
        stderr_file.seek(0)
        sys.stderr.write(stderr_file.read().decode(errors="replace"))
    return 0 if failed_rank is None else abs(children[failed_rank].returncode)


def _wait_for_first_failure(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all children have exited, and return the index of the first that failed; None if no child failed.

    After a failure, the other children are killed if they do not exit within 5 s.
    """
    failed_rank, kill_at = None, math.inf
    while any(child.poll() is None for child in children):
        with contextlib.suppress(KeyboardInterrupt):  # the children receive SIGINT, too, and handle it
            if failed_rank is None and (failed_ranks := [rank for rank, child in enumerate(children) if child.returncode]):
                failed_rank, kill_at = failed_ranks[0], time.monotonic() + _EXIT_GRACE_SECONDS
            for child in children if time.monotonic() > kill_at else ():
                child.kill()
            time.sleep(_POLL_SECONDS)
    return next((rank for rank, child in enumerate(children) if child.returncode), None) if failed_rank is None else failed_rank


def _write_input_file(request: Mapping[str, Any]) -> IO[bytes]:
    """Return a readable file that contains `request`.

    Command-line arguments would exceed ARG_MAX for many prompts, and be visible in ps.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the started process inherits it
    file.write(json.dumps(request).encode())
    file.seek(0)
    return file


def _build_trainer_command(command: str, required_package: str = "torch") -> list[str]:
    if importlib.util.find_spec(required_package) is None:
        raise SwarmtrainError(
            f"{sys.executable} cannot find {required_package}, which this command requires",
            place="this machine",
            hint=f"pip install 'swarmtrain[{'train' if required_package == 'torch' else 'data'}]'",
        )
    return [sys.executable, "-m", "swarmtrain.trainer", command]
