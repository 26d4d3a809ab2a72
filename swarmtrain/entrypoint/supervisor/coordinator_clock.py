"""A common clock for all nodes of a rendezvous: the coordinator's monotonic clock, which cannot be set.

torch's rendezvous compares node heartbeats by the wall clock of each machine. If one node's clock is off by several seconds, or is set
during a run, that node considers all other nodes dead, or the other nodes consider that node dead.
"""

from __future__ import annotations

import time
from datetime import datetime, tzinfo

from swarmtrain.protocol.coordinator_client import CoordinatorClient


def use_coordinator_clock(coordinator: CoordinatorClient) -> None:
    """Make torch's rendezvous in this process use the clock of `coordinator`.

    Raises CoordinatorError if the coordinator cannot be reached.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    offset = coordinator.measure_monotonic_offset()

    class CoordinatorDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]  # stored values must be of torch's own type
            return datetime.fromtimestamp(time.monotonic() + offset, tz)

    dynamic_rendezvous.datetime = CoordinatorDatetime  # type: ignore[misc]  # torch has no other hook for its clock
