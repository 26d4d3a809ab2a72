"""Attached run: one rank runs in the foreground for a debugger, and each other rank in the background with its own log file.

No rank is restarted. All ranks belong to one node, this machine, and run the script from its original folder. There is no coordinator, so a
rank that pauses at a breakpoint is not declared lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmtrain import process
from swarmtrain.atomic_file import open_private_file
from swarmtrain.config.user_files import get_shipped_name
from swarmtrain.errors import PlanError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common import history_store
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import ENV_ATTACHED, ENV_PREFIX
from swarmtrain.protocol.distributed_env import LOOPBACK, reserve_port
from swarmtrain.render.process_environment import NodeLayout, build_node_env

_EXIT_GRACE_SECONDS = 10.0
"""Seconds to wait for the exit of the other ranks, once before SIGTERM and once after it."""


def attach_rank(plan: Plan, rank: int, report_progress: ProgressReporter) -> int:
    """Run all ranks of `plan`, with `rank` attached to this terminal, and return the exit code of `rank`.

    Raises PlanError if `rank` is not a rank of `plan`.
    """
    if rank >= plan.world_size:
        raise PlanError(f"unknown rank; valid ranks: 0 to {plan.world_size - 1}", place=f"--attach {rank}")
    folder = history_store.create_run_folder(plan.run)
    with tempfile.TemporaryDirectory(prefix="swarmtrain-") as private_folder:
        port = reserve_port()
        rendezvous_env = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port.getsockname()[1])}
        shared_env = _build_shared_env(plan, Path(private_folder)) | rendezvous_env
        environments = [shared_env | _build_rank_env(number, plan.world_size) for number in range(plan.world_size)]
        runner = plan.config.runner
        argv = [sys.executable, *(["-m", runner.module] if runner.module else [str(runner.script)]), *runner.script_args]
        with _run_other_ranks(argv, environments, rank, folder, report_progress), _ignore_sigint():
            code = process.start_process(argv, env=environments[rank], stdin=sys.stdin.fileno()).wait()
        port.close()
    return code if code >= 0 else 128 - code


@contextmanager
def _run_other_ranks(
    argv: list[str], environments: list[dict[str, str]], attached_rank: int, log_folder: Path, report_progress: ProgressReporter
) -> Iterator[None]:
    children: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for other_rank, environment in enumerate(environments):
            if other_rank != attached_rank:
                log = log_folder / f"rank{other_rank}.log"
                with open_private_file(log, "wb") as output:
                    children[log] = process.start_process(
                        argv, env=environment, stdout=output, stderr=subprocess.STDOUT, new_session=True, die_with_parent=True
                    )
        if children:
            report_progress(
                f"rank {attached_rank} is attached to this terminal; the output of the other ranks is in {log_folder}/rank*.log"
            )
        yield
    finally:
        for log, child in children.items():
            if code := _terminate_process(child):
                report_progress(f"{log.stem} exited with code {code}: {log}")


def _terminate_process(child: subprocess.Popen[bytes]) -> int:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_EXIT_GRACE_SECONDS)
        child.send_signal(signal_number)
    return child.wait()


@contextmanager
def _ignore_sigint() -> Iterator[None]:
    """Ignore Ctrl-C (SIGINT) in this process during the body: the rank in the foreground handles it."""
    previous_handler = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _build_shared_env(plan: Plan, private_folder: Path) -> dict[str, str]:
    """Return the environment variables that all ranks share, without the address of a coordinator.

    The config and the secrets, to which the variables refer, are written to `private_folder`.
    """
    config = private_folder / "config.json"
    config.write_text(plan.config.to_node_config().to_json())
    for secret in plan.cargo.node_secrets:
        (private_folder / secret.name).touch(mode=0o600)
        (private_folder / secret.name).write_bytes(secret.content)
    layout = NodeLayout(
        coordinator_host=LOOPBACK,
        bind_address=LOOPBACK,
        config_path=str(config),
        code_folder=Path.cwd(),
        secrets_dir=private_folder,
        log_dir=str(private_folder),
        coordinator_port=0,
    )
    node_environment = build_node_env(plan, plan.nodes[0], layout)
    del node_environment[f"{ENV_PREFIX}COORDINATOR"]
    outside_folders = [str(path.absolute().parent) for path in plan.config.runner.code if path != Path(get_shipped_name(path))]
    python_path = os.pathsep.join(filter(None, dict.fromkeys([str(Path.cwd()), *outside_folders, os.environ.get("PYTHONPATH", "")])))
    threads = max(1, len(os.sched_getaffinity(0)) // plan.world_size)
    defaults = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), "PYTHONPATH": python_path}
    return {**defaults, **node_environment, ENV_ATTACHED: "1"}


def _build_rank_env(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
