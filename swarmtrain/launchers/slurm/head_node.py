"""Monitor of a Slurm job's head node (its first node), which runs the coordinator and the batch script.

Slurm ends a job when its head node dies, unless the job has `--no-kill`, which elastic runs set to survive the loss of another node. A job
with `--no-kill` stays RUNNING, and its batch script died with the head node, so it cannot requeue the job. The other nodes requeue it.
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


def requeue_if_head_node_dies(head_node: str, coordinator_address: tuple[str, int], job: str, finished: threading.Event) -> None:
    """Monitor the head node `head_node`, and requeue the job `job` if it dies. Return after the requeue, or when `finished` is set.

    As long as the coordinator at `coordinator_address` accepts connections, Slurm is not queried. It is not an error if Slurm refuses the
    requeue because the job is not allowed to be requeued, or because it is requeued already.
    """
    while not finished.wait(_CHECK_SECONDS):
        if _is_address_reachable(coordinator_address) or not is_node_dead(head_node):
            continue
        LOG.warning("%s, the first node of job %s, is down: the job is requeued", head_node, job)
        with contextlib.suppress(ProcessError):
            run_command(["scontrol", "requeue", job], timeout=_SLURM_TIMEOUT_SECONDS)
            return


def is_node_dead(name: str) -> bool:
    """Return whether Slurm considers the node `name` dead; False if Slurm does not answer."""
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
