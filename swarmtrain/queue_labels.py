"""What the labels of a run's coordinator record of the queue: the state of its entry, and its stop by the scheduler.

The scheduler writes the stop into labels of the coordinator's service, and restarts the coordinator once the run has saved. A container
gets the values that its labels have when it is created, in one variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from swarmtrain.protocol import ENV_PREFIX

ENV_QUEUE_STOP = f"{ENV_PREFIX}QUEUE_STOP"
"""Variable of a coordinator that sends notifications in a swarm: the stop that it reports when it starts, as QUEUE_STOP_TEMPLATE."""

# Labels of a run in a queue, on its coordinator: when its state changed, how many steps it lost then, and how and why the scheduler has
# stopped it (empty unless it has).
LABEL_QUEUE_CHANGED = "swarmtrain.queue.changed"
LABEL_QUEUE_LOST = "swarmtrain.queue.lost"
LABEL_QUEUE_STOP = "swarmtrain.queue.stop"

QUEUE_STOP_TEMPLATE = " ".join(
    f'{{{{index .Service.Labels "{label}"}}}}' for label in (LABEL_QUEUE_CHANGED, LABEL_QUEUE_LOST, LABEL_QUEUE_STOP)
)
"""Swarm's template for the value of ENV_QUEUE_STOP."""

_RESUMES, _ENDS = "resumes", "ends"


class EntryState(StrEnum):
    """State of a run's entry in the queue."""

    incomplete = "incomplete"
    """Not all of its services exist yet. If its submission was interrupted, another deploy completes it."""
    waiting = "waiting"
    admitted = "admitted"
    stopped = "stopped"
    """Stopped by a user or by the scheduler; another deploy queues it again."""


@dataclass(frozen=True)
class QueueStop:
    """Stop of a run by the scheduler of a queue."""

    time: float
    """Seconds since the epoch, by the scheduler's clock."""
    lost_steps: int
    resumes: bool
    """Whether the run waits in the queue, and resumes by itself."""
    reason: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the stop in the variables `environ`; None if the scheduler has not stopped the run."""
        match environ.get(ENV_QUEUE_STOP, "").split(maxsplit=3):
            case [time_text, lost_text, how, reason] if time_text.isdecimal() and lost_text.isdecimal():
                return cls(float(time_text), int(lost_text), how == _RESUMES, reason)
        return None


def format_queue_stop(reason: str, *, resumes: bool) -> str:
    """Return the value of LABEL_QUEUE_STOP."""
    return f"{_RESUMES if resumes else _ENDS} {reason}"
