"""Monitor a Slurm job's head node (its first node, with the coordinator and the batch script), and requeue the job if the node dies.

Slurm ends a job when its head node dies, unless the job has `--no-kill`, which elastic runs set to survive the loss of another node. A job
with `--no-kill` stays RUNNING, but its batch script died with the head node and cannot requeue it. So the other nodes requeue the job.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading

from swarmtrain.errors import ProcessError
from swarmtrain.process import run_command

LOG = logging.getLogger("swarmtrain")
_CHECK_SECONDS = 5.0
_CONNECT_TIMEOUT_SECONDS = 5.0
_DEAD_PATTERN = re.compile(r"\bState=\S*(DOWN|NOT_RESPONDING|FAIL)|\bState=\w+\*")
_SLURM_TIMEOUT_SECONDS = 30.0


def requeue_if_head_node_dies(head_node: str, coordinator_address: tuple[str, int], job_id: str, finished_event: threading.Event) -> None:
    """Monitor `head_node`, and requeue the job `job_id` if it dies. Return after the requeue, or when `finished_event` is set.

    As long as the coordinator at `coordinator_address` accepts connections, Slurm is not queried. A requeue that Slurm refuses is retried
    after the next check, and is not an error: the job may not be requeueable, or may be requeued already.
    """
    while not finished_event.wait(_CHECK_SECONDS):
        if _is_address_reachable(coordinator_address) or not is_node_dead(head_node):
            continue
        LOG.warning("%s, the first node of job %s, is down: the job is requeued", head_node, job_id)
        with contextlib.suppress(ProcessError):
            run_command(["scontrol", "requeue", job_id], timeout=_SLURM_TIMEOUT_SECONDS)
            return


def is_node_dead(name: str) -> bool:
    """Return whether Slurm reports the node `name` as DOWN, FAIL or not responding (`*`); False if Slurm does not answer."""
    try:
        output = run_command(["scontrol", "show", "node", "--oneliner", name], timeout=_SLURM_TIMEOUT_SECONDS)
    except ProcessError:
        return False
    return _DEAD_PATTERN.search(output) is not None


def _is_address_reachable(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, _CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True
