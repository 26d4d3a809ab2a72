"""Process keeper of one node of a Slurm job: runs and restarts the node's supervisor and, on the first node, the coordinator.

srun starts `python -m swarmtrain.launchers.slurm.node_task FOLDER` as one task per node. The task reads ports and node names, which are
unknown until the job runs, from Slurm's variables. When a stop is requested (by swarmtrain's SIGURG or Slurm's SIGTERM), it requests the
supervisor to exit; the coordinator exits after the nodes. A SIGTERM on the first node creates a marker file, by which the sbatch script
recognizes a preemption. The other nodes requeue the job if the first node dies.

The exit code of the task determines what the sbatch script does: EXIT_PLANNED means that training is not finished; otherwise the run is
over, and the first node's exit code is that of the run's outcome.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from swarmtrain.atomic_file import SECRET_MODE, open_private_file, write_text_atomically
from swarmtrain.errors import ProcessError
from swarmtrain.launchers.slurm.slurm_run_folder import (
    JobAttempt,
    NodeState,
    SlurmRunFolder,
    read_node_state,
    read_outcome_exit_code,
    record_job_id,
)
from swarmtrain.process import run_command, start_process
from swarmtrain.protocol import ENV_RUN_ID, EXIT_PLANNED, RENDEZVOUS_SERVICE, ROLE_NODE, ROLE_RENDEZVOUS
from swarmtrain.protocol.distributed_env import compute_slurm_base_port, expand_hostlist
from swarmtrain.remote.timestamped_log import open_timestamped_log
from swarmtrain.render.process_environment import ENTRYPOINT_MODULE
from swarmtrain.render.sbatch_script import TERMINATED_FILE

LOG = logging.getLogger("swarmtrain")
_RESTART_DELAY_SECONDS = 1.0
_SCONTROL_TIMEOUT_SECONDS = 5.0
_POLL_SECONDS = 0.1
_RECORD_TIMEOUT_SECONDS = 120.0  # a shared file system may show another node's new file only after its cache has expired
# Slurm's SIGTERM reaches every process of a job at once, and the coordinator is needed until the ranks have saved.
_IGNORE_SIGTERM_ARGV = ["sh", "-c", 'trap "" TERM; exec "$0" "$@"']
_HEAD_NODE_CHECK_SECONDS = 5.0
_CONNECT_TIMEOUT_SECONDS = 5.0
_DEAD_NODE_PATTERN = re.compile(r"\bState=\S*(DOWN|NOT_RESPONDING|FAIL)|\bState=\w+\*")
_REQUEUE_TIMEOUT_SECONDS = 30.0


def main(run_path: Path) -> int:
    """Run this node's supervisor (and on the first node the coordinator) until the run is over or a stop is requested.

    Return the exit code of the task, as documented in the module's docstring.
    """
    environ = os.environ
    attempt = JobAttempt(environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], int(environ.get("SLURM_RESTART_COUNT", 0)))
    host_names = list(expand_hostlist(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]))
    node_index = int(environ["SLURM_NODEID"])
    port = int(environ.get("SWARMTRAIN_MASTER_PORT") or compute_slurm_base_port(environ))
    head_address = resolve_head_node_address(host_names[0])
    environ |= {
        "SWARMTRAIN_NODE": f"node{node_index}",
        "SWARMTRAIN_COORDINATOR": f"{head_address}:{port}",
        "SWARMTRAIN_COORDINATOR_PORT": str(port),
        "SWARMTRAIN_BIND": _choose_bind_address(head_address),
    }
    run_folder = SlurmRunFolder(run_path)
    if node_index == 0:
        record_job_id(run_folder, environ["SWARMTRAIN_FILES"], attempt.job)
    else:
        _wait_for_record(run_folder)
    environ[ENV_RUN_ID] = run_folder.recorded_run.identity.id
    host = environ.get("SLURMD_NODENAME", socket.gethostname())
    node = RestartingProcess(run_folder, f"node{node_index}", ROLE_NODE, host, attempt)
    coordinator = RestartingProcess(run_folder, RENDEZVOUS_SERVICE, ROLE_RENDEZVOUS, host, attempt) if node_index == 0 else None

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        if signal_number == signal.SIGTERM and coordinator is not None:
            (run_path / TERMINATED_FILE).touch()
        node.stop()

    for signal_number in (signal.SIGURG, signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, handle_signal)
    if coordinator is not None:
        coordinator.start()
    node.start()
    if coordinator is None:
        finished = threading.Event()
        args = (host_names[0], (head_address, port), attempt.job, finished)
        threading.Thread(target=_requeue_if_head_node_dies, args=args, daemon=True).start()
        node.wait()
        finished.set()
        return EXIT_PLANNED if node.exit_code else 0
    node.wait()
    if node.exit_code:
        _wait_for_other_nodes(run_path, len(host_names), attempt)
        coordinator.stop()
    coordinator.wait()
    return EXIT_PLANNED if node.exit_code else read_outcome_exit_code(run_folder.events_path, default=0)


def resolve_head_node_address(name: str) -> str:
    """Return the address at which other nodes reach the head node `name`, the first node of the job.

    The address is the node's name or, if the name does not resolve or resolves to loopback, the NodeAddr that Slurm reports for the node.
    """
    ip = _resolve_ip(name)
    if ip and not ip.startswith("127."):
        return name
    with contextlib.suppress(ProcessError):
        match = re.search(
            r"\bNodeAddr=(\S+)", run_command(["scontrol", "show", "node", "--oneliner", name], timeout=_SCONTROL_TIMEOUT_SECONDS)
        )
        if match and _resolve_ip(match[1]):
            return match[1]
    return name


def _choose_bind_address(head_address: str) -> str:
    """Return the address on which the head node listens: the one that the others use, or all addresses if that one is unknown."""
    address = _resolve_ip(head_address)
    return address if address and not address.startswith("127.") else "0.0.0.0"  # noqa: S104


def _resolve_ip(host_name: str) -> str:
    try:
        return socket.gethostbyname(host_name)
    except OSError:
        return ""


def _wait_for_record(run_folder: SlurmRunFolder) -> None:
    """Wait until the first node has written the run's record. Raises RunNotFound if the record does not appear in time."""
    deadline = time.monotonic() + _RECORD_TIMEOUT_SECONDS
    while not run_folder.exists and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    run_folder.read_job_record()


def _wait_for_other_nodes(run_folder: Path, node_count: int, attempt: JobAttempt) -> None:
    """Wait for the other nodes to exit, since ranks that save before they exit still need the coordinator.

    The wait is limited to the grace period.
    """
    deadline = time.monotonic() + float(os.environ["SWARMTRAIN_STOP_GRACE"])
    while time.monotonic() < deadline and any(_is_node_running(run_folder, f"node{index}", attempt) for index in range(node_count)):
        time.sleep(_POLL_SECONDS)


def _is_node_running(run_folder: Path, name: str, attempt: JobAttempt) -> bool:
    state = read_node_state(run_folder, name)
    return state is not None and state.attempt == attempt and state.state in ("running", "failed")


def _requeue_if_head_node_dies(head_node: str, coordinator_address: tuple[str, int], job_id: str, finished_event: threading.Event) -> None:
    """Monitor `head_node`, and requeue the job `job_id` if it dies. Return after the requeue, or when `finished_event` is set.

    Slurm ends a job when its head node dies (the first node, with the coordinator and the batch script), unless the job has `--no-kill`,
    which elastic runs set to survive the loss of another node. Such a job stays RUNNING, but its batch script died with the head node and
    cannot requeue it. So the other nodes requeue the job.

    As long as the coordinator at `coordinator_address` accepts connections, Slurm is not queried. A requeue that Slurm refuses is retried
    after the next check, and is not an error: the job may not be requeueable, or may be requeued already.
    """
    while not finished_event.wait(_HEAD_NODE_CHECK_SECONDS):
        if _is_address_reachable(coordinator_address) or not _is_node_dead(head_node):
            continue
        LOG.warning("%s, the first node of job %s, is down: the job is requeued", head_node, job_id)
        with contextlib.suppress(ProcessError):
            run_command(["scontrol", "requeue", job_id], timeout=_REQUEUE_TIMEOUT_SECONDS)
            return


def _is_node_dead(name: str) -> bool:
    """Return whether Slurm reports the node `name` as DOWN, FAIL or not responding (`*`); False if Slurm does not answer."""
    try:
        output = run_command(["scontrol", "show", "node", "--oneliner", name], timeout=_REQUEUE_TIMEOUT_SECONDS)
    except ProcessError:
        return False
    return _DEAD_NODE_PATTERN.search(output) is not None


def _is_address_reachable(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, _CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


class RestartingProcess:
    """A process that is restarted if it fails, as with Swarm's `restart_policy: on-failure`. Exit code 0 is final."""

    def __init__(self, run_folder: SlurmRunFolder, name: str, role: str, host: str, attempt: JobAttempt) -> None:
        self.folder, self.name, self.role, self.host, self.attempt = run_folder, name, role, host, attempt
        self.stopping = False
        self.exit_code = 0
        self.restarts = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run_with_restarts)

    @property
    def is_coordinator(self) -> bool:
        return self.role == ROLE_RENDEZVOUS

    def start(self) -> None:
        self._write_node_state("running")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the process has exited and is not restarted any more; `exit_code` is then its exit code."""
        while self._thread.is_alive():  # a join without a timeout would delay signals
            self._thread.join(0.1)

    def stop(self) -> None:
        """Request the process to exit, and do not restart it."""
        self.stopping = True
        if (child := self._child) is not None:
            self._send_stop_signal(child)

    def _run_with_restarts(self) -> None:
        while True:
            self.exit_code = self._run_once()
            if self.exit_code == 0 or self.stopping:
                self._write_node_state("shutdown" if self.exit_code else "complete", self.exit_code)
                return
            self._write_node_state("failed", self.exit_code)
            time.sleep(_RESTART_DELAY_SECONDS)
            self.restarts += 1
            self._write_node_state("running")

    def _run_once(self) -> int:
        argv = [*(_IGNORE_SIGTERM_ARGV if self.is_coordinator else []), sys.executable, "-m", ENTRYPOINT_MODULE, self.role]
        events: Any = open_private_file(self.folder.events_path, "ab") if self.is_coordinator else contextlib.nullcontext()
        with open_timestamped_log(self.folder.get_log_path(self.name)) as log, events as events_out:
            # die_with_parent refers to the thread, which lives as long as the child.
            child = self._child = start_process(argv, stdout=events_out or log, stderr=log, die_with_parent=True)
            if self.stopping:
                self._send_stop_signal(child)
            return child.wait()

    def _send_stop_signal(self, child: subprocess.Popen[bytes]) -> None:
        child.send_signal(signal.SIGINT if self.is_coordinator else signal.SIGTERM)

    def _write_node_state(self, state: str, exit_code: int | None = None) -> None:
        node_state = NodeState(self.host, state, self.attempt, exit_code, self.restarts)
        with contextlib.suppress(OSError):
            write_text_atomically(self.folder.path / f"{self.name}.state", json.dumps(asdict(node_state)), mode=SECRET_MODE)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
