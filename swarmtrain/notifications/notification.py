"""The contents of a notification: what happened to which run, as a line of text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class NotificationKind(StrEnum):
    """What a notification is about; the values of `events` of a channel."""

    outcome = "outcome"
    preemption = "preemption"
    stop = "stop"
    straggler = "straggler"
    quarantine = "quarantine"
    disk = "disk"


TEST_KIND = "test"
"""Kind of the notification that `swarmtrain notify-test` sends, whatever the `events` of a channel are."""


@dataclass(frozen=True)
class Notification:
    """One notification. Its `id` is the same in every attempt to deliver it, so that a receiver can drop a repeated one."""

    id: str
    kind: str
    run: str
    time: float
    """Time of the event in seconds since the epoch."""
    message: str
    """One line for the user: for an outcome, the first line of `swarmtrain why`."""
    data: dict[str, Any] = field(default_factory=dict)
    """Fields of the event, JSON-compatible."""

    def to_body(self) -> bytes:
        """Return the JSON body of a webhook's request: type, timestamp and data, as Standard Webhooks recommends."""
        timestamp = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        data = {**self.data, "id": self.id, "run": self.run, "message": self.message}
        return json.dumps({"type": f"run.{self.kind}", "timestamp": timestamp, "data": data}, default=str).encode()

    def to_dict(self) -> dict[str, Any]:
        """Return the notification as a JSON-compatible dict, the argument list of the class."""
        return asdict(self)
