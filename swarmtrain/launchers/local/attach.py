"""One rank in the foreground, for a debugger; the others beside it, each with a log of its own. Nothing is started again.

All ranks are of one node, this machine, and run the script where it lies. There is no notice board: a rank that stands at
a breakpoint is not given up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import PlanError
from swarmtrain.launchers import kept
from swarmtrain.launchers.base import Say
from swarmtrain.plan import Plan
from swarmtrain.render.command import Place, node_env
from swarmtrain.wire import ATTACHED, PREFIX

_LOOPBACK = "127.0.0.1"
_GOODBYE = 10.0
"""Seconds that the others get to end by themselves, and again to end when asked."""


def attach(plan: Plan, rank: int, say: Say) -> int:
    """Run all ranks of `plan`, `rank` with this terminal, and return that one's exit code. Raises PlanError if there is no such rank."""
    if rank >= plan.world_size:
        raise PlanError(f"there is no such rank; there are 0 to {plan.world_size - 1}", place=f"--attach {rank}")
    folder = kept.directory(plan.run)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="swarmtrain-") as private:
        common = _environment(plan, Path(private))
        environments = [common | _own(number, plan.world_size) for number in range(plan.world_size)]
        argv = [sys.executable, str(plan.config.runner.script), *plan.config.runner.script_args]
        with _others(argv, environments, rank, folder, say), _deaf_to_ctrl_c():
            code = process.start(argv, env=environments[rank], stdin=sys.stdin.fileno()).wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _others(argv: list[str], environments: list[dict[str, str]], rank: int, folder: Path, say: Say) -> Iterator[None]:
    running: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for number, environment in enumerate(environments):
            if number != rank:
                log = folder / f"rank{number}.log"
                with log.open("wb") as output:
                    running[log] = process.start(
                        argv, env=environment, stdout=output, stderr=subprocess.STDOUT, new_session=True, die_with_parent=True
                    )
        if running:
            say(f"rank {rank} has this terminal; what the others print is in {folder}/rank*.log")
        yield
    finally:
        for log, other in running.items():
            if code := _end(other):
                say(f"{log.stem} ended with exit code {code}: {log}")


def _end(other: subprocess.Popen[bytes]) -> int:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return other.wait(_GOODBYE)
        other.send_signal(number)
    return other.wait()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Ctrl-C is for the rank in the foreground, and this process waits for what comes of it."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _environment(plan: Plan, private: Path) -> dict[str, str]:
    """Return what all ranks have alike: that of a node, but for the board, and its files in `private`."""
    config = private / "config.json"
    config.write_text(plan.config.resolved().to_json())
    for secret in plan.cargo.secrets:
        (private / secret.name).touch(mode=0o600)
        (private / secret.name).write_bytes(secret.content)
    place = Place(
        board_host=_LOOPBACK,
        bind=_LOOPBACK,
        config=str(config),
        code_dir=Path.cwd(),
        secrets_dir=private,
        log_dir=str(private),
        store_port=0,
        board_port=0,
    )
    environment = node_env(plan, plan.nodes[0], place)
    del environment[f"{PREFIX}BOARD"]
    beside = [str(path.absolute().parent) for path in plan.config.runner.code]
    imported = os.pathsep.join(filter(None, [*dict.fromkeys(beside), os.environ.get("PYTHONPATH", "")]))
    threads = max(1, len(os.sched_getaffinity(0)) // plan.world_size)
    defaults = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), "PYTHONPATH": imported}
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        meeting = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(free.getsockname()[1])}
    return {**defaults, **environment, **meeting, ATTACHED: "1"}


def _own(rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
