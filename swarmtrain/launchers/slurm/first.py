"""The first node of a job, as the others see it: where it is dead, so are the board and the batch script.

Slurm ends a job whose first node dies, but not one with `--no-kill`, which elastic runs have so that they outlive all other
nodes: it stays RUNNING, and nobody is left to queue it again. So its other nodes do.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading

from swarmtrain.errors import ProcessError
from swarmtrain.process import run

LOG = logging.getLogger("swarmtrain")
_EVERY = 5.0
_CONNECTED_WITHIN = 5.0
_DEAD = re.compile(r"\bState=\S*(DOWN|NOT_RESPONDING|FAIL)|\bState=\w+\*")
_SLURM_ANSWERS_WITHIN = 30.0


def queue_again_without(name: str, board: tuple[str, int], job: str, over: threading.Event) -> None:
    """Return when `over` is set, or when the job is queued again since its first node, called `name`, is dead.

    `board` is where that has its notice board: as long as there is an answer, Slurm is not asked. Slurm refuses where the job
    is not to be queued again, and where it is already: both are left at that.
    """
    while not over.wait(_EVERY):
        if _answers(board) or not is_dead(name):
            continue
        LOG.warning("%s, the first node of job %s, is dead: the job is queued again", name, job)
        with contextlib.suppress(ProcessError):
            run(["scontrol", "requeue", job], timeout=_SLURM_ANSWERS_WITHIN)
            return


def is_dead(name: str) -> bool:
    """Say whether Slurm has lost a node; no if it cannot be asked."""
    try:
        said = run(["scontrol", "show", "node", "--oneliner", name], timeout=_SLURM_ANSWERS_WITHIN)
    except ProcessError:
        return False
    return _DEAD.search(said) is not None


def _answers(board: tuple[str, int]) -> bool:
    try:
        socket.create_connection(board, _CONNECTED_WITHIN).close()
    except OSError:
        return False
    return True
