"""States of a run's services in the user's words: the table of the states of engines, and of their messages.

TaskState keeps the engine's own words, by which programs recognize a state. What is printed comes from here.
"""

from __future__ import annotations

import re

from swarmtrain.launchers.base import TaskState

STATE_REASONS = {
    "new": "it has no machine yet",
    "allocated": "it has no machine yet",
    "pending": "no machine has been chosen for it yet",
    "assigned": "its machine has not responded yet",
    "accepted": "its machine has not prepared it yet",
    "preparing": "its machine pulls the image if it does not have it, and creates the container",
    "ready": "its container is about to start",
    "starting": "its process is about to start",
    "running": "",
    "complete": "",
    "shutdown": "",
    "stopping": "it was asked to stop",
    "stopped": "",
    "removed": "",
    "failed": "it ended with an error",
    "rejected": "its machine could not start it",
    "remove": "its service is removed",
    "orphaned": "its machine has been down for too long",
    "paused": "somebody has paused its container",
    "dead": "its engine could not remove its container",
    "queued": "it waits in the queue",
    "unreachable": "its host does not answer",
    "down": "the run is down",
}
"""What each state of an engine means, if the engine gives no reason; empty if the state says enough. The states are those of Swarm, of
containers, of processes, and those that swarmtrain adds."""

_MESSAGE_WORDS = (
    (r"no suitable node \(scheduling constraints not satisfied on \d+ nodes?\)", "no machine of the swarm meets its constraints"),
    (r"no suitable node \(insufficient resources on \d+ nodes?\)", "no machine has the reserved resources free"),
    (r"no suitable node \(\d+ nodes? not available for new tasks\)", "all machines are down or drained"),
    (r"no suitable node \(([^)]*)\)", r"no machine can run it: \1"),
    (r"task: non-zero exit \(137\)", "its container was killed, exit code 137"),
    (r"task: non-zero exit \(255\)", "its container ended together with its machine or engine"),
    (r"task: non-zero exit \((\d+)\)", r"its container exited with exit code \1"),
    (r"assigned node no longer meets constraints", "its machine no longer meets its constraints"),
    (r"No such image: (\S+)", r"its machine could not pull the image \1"),
    (r"invalid mount config for type \"bind\": bind source path does not exist: (\S+)", r"the folder \1 does not exist on its machine"),
)
_MACHINE_NEEDED_PATTERN = re.compile(r"no suitable node \((scheduling constraints|\d+ nodes? not available)|^$")


def describe_task_reason(task: TaskState) -> str:
    """Return why `task` is in its state, in the user's words; empty if the state says enough."""
    if task.machine_problem and task.state == "pending" and _MACHINE_NEEDED_PATTERN.search(task.reason):
        return f"waits for {task.host}, which is {task.machine_problem}"
    reason = task.reason
    for pattern, words in _MESSAGE_WORDS:
        reason = re.sub(pattern, words, reason)
    return reason or STATE_REASONS.get(task.state, "")


def format_task_state(task: TaskState) -> str:
    """Return `task` as a line of text: `node1 on gpu-1: preparing, REASON`."""
    reason = describe_task_reason(task)
    return f"{task.node}{f' on {task.host}' if task.host else ''}: {task.state}{f', {reason}' if reason else ''}"
