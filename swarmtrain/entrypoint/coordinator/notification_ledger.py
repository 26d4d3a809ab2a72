"""Ledger of a run's notifications: which exist, and to which channels each must still be delivered.

The nodes keep copies of it: it is part of each response to a supervisor, which sends it back with its next request. So it survives the loss
of the coordinator and of its machine, as long as one node lives. A notification is delivered only once a node has a copy; a new coordinator
then neither forgets it nor creates it a second time.

Pure: time comes from `clock` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.notifications.notification import Notification, NotificationKind

REPLICATION_TIMEOUT_SECONDS = 2.5
"""Seconds after which a notification is delivered although no node has a copy of it: perhaps no node is left. Nodes send one heartbeat per
second, and have a copy with the second."""
OUTCOME_DELIVERY_SECONDS = 5.0
"""Seconds after the outcome in which notifications are delivered. Then the coordinator gives up, so that the run can end."""
_MAX_DONE_COUNT = 200
_MAX_PENDING_COUNT = 100
"""A copy of the ledger is part of each heartbeat, whose size is limited. Beyond this number, the oldest notifications are given up."""


@dataclass
class LedgerEntry:
    """A notification, and the names of the channels to which it must still be delivered. `notification` is None if there are none left."""

    notification_id: str
    key: str
    notification: Notification | None
    pending: set[str]
    observed_at: float
    has_copy: bool = False
    """Whether a node has a copy."""

    def to_record(self) -> dict[str, Any]:
        """Return the entry as nodes keep it."""
        contents = {"notification": self.notification.to_dict()} if self.notification and self.pending else {}
        return {"id": self.notification_id, "key": self.key, "pending": sorted(self.pending), **contents}


@dataclass
class NotificationLedger:
    """Ledger of the notifications of one run. `channels`: names of the channels, by the kind of notification that they receive."""

    channels: Mapping[str, Collection[str]]
    clock: Callable[[], float]
    _entries: dict[str, LedgerEntry] = field(default_factory=dict)
    _give_up_at: float | None = None

    @property
    def is_outcome_known(self) -> bool:
        """Whether the run has an outcome, so that deliveries must end soon."""
        return self._give_up_at is not None

    @property
    def has_pending_notifications(self) -> bool:
        """Whether a notification is still to be delivered to a channel."""
        return any(entry.pending for entry in self._entries.values())

    def has_key(self, key: str) -> bool:
        """Return whether a notification exists of the condition with this key."""
        return any(entry.key == key for entry in self._entries.values())

    def forget_keys(self, prefix: str) -> None:
        """Forget the conditions whose keys begin with `prefix`, because they have ended."""
        for entry in self._entries.values():
            if entry.key.startswith(prefix):
                entry.key = ""

    def add_notification(self, notification: Notification, observed_at: float, key: str = "") -> None:
        """Add a notification, to be delivered to the channels that receive its kind. `observed_at`: time of its event, by the clock."""
        pending = set(self.channels.get(notification.kind, ()))
        self._entries[notification.id] = LedgerEntry(notification.id, key, notification, pending, observed_at)
        if notification.kind == NotificationKind.outcome:
            self._give_up_at = self.clock() + OUTCOME_DELIVERY_SECONDS
        self._drop_oldest()

    def merge_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Merge the copy of a node: what it has and this ledger lacks, and what was delivered before this coordinator started.

        Raises KeyError, TypeError or ValueError if a record is malformed.
        """
        known_channels = {name for names in self.channels.values() for name in names}
        for record in records:
            entry = self._entries.get(str(record["id"]))
            pending = {str(name) for name in record["pending"]} & known_channels
            if entry is not None:
                entry.has_copy = True
                self._set_pending(entry, entry.pending & pending)
                continue
            notification = Notification(**record["notification"]) if pending else None
            entry = LedgerEntry(str(record["id"]), str(record["key"]), notification, pending, self.clock(), has_copy=True)
            self._entries[entry.notification_id] = entry
            if notification and notification.kind == NotificationKind.outcome and self._give_up_at is None:
                self._give_up_at = self.clock() + OUTCOME_DELIVERY_SECONDS
        self._drop_oldest()

    def export_records(self) -> list[dict[str, Any]]:
        """Return the copy for a node."""
        return [entry.to_record() for entry in self._entries.values()]

    def find_due_notification(self, channel: str) -> Notification | None:
        """Return the oldest notification that can be delivered to `channel` now, but an outcome first; None if there is none."""
        due = [
            entry.notification
            for entry in self._entries.values()
            if entry.notification
            and channel in entry.pending
            and (entry.has_copy or self.clock() - entry.observed_at >= REPLICATION_TIMEOUT_SECONDS)
        ]
        return min(due, key=lambda notification: notification.kind != NotificationKind.outcome, default=None)

    def mark_delivered(self, notification_id: str, channel: str) -> None:
        """Record that a notification was delivered to `channel`."""
        if entry := self._entries.get(notification_id):
            self._set_pending(entry, entry.pending - {channel})

    def postpone(self, notification_id: str) -> None:
        """Let the other notifications of its channels go first: a receiver may refuse this one and accept them."""
        if notification_id in self._entries:
            self._entries[notification_id] = self._entries.pop(notification_id)

    def drop_channel(self, channel: str) -> None:
        """Give up the deliveries to `channel`, and create no more for it."""
        self.channels = {kind: [name for name in names if name != channel] for kind, names in self.channels.items()}
        for entry in list(self._entries.values()):
            self._set_pending(entry, entry.pending - {channel})

    def give_up_deliveries(self) -> list[tuple[str, str]]:
        """If the time after the outcome is over, give up what is pending. Return the channel and the id of each notification given up."""
        if self._give_up_at is None or self.clock() < self._give_up_at:
            return []
        given_up = [(channel, entry.notification_id) for entry in self._entries.values() for channel in sorted(entry.pending)]
        for entry in list(self._entries.values()):
            self._set_pending(entry, set())
        return given_up

    def _set_pending(self, entry: LedgerEntry, pending: set[str]) -> None:
        if entry.pending and not pending:
            entry.notification = None
            self.postpone(entry.notification_id)  # the copies of other nodes still contain it, so it must not be dropped soon
        entry.pending = pending

    def _drop_oldest(self) -> None:
        waiting = [
            entry
            for entry in self._entries.values()
            if entry.pending and entry.notification and entry.notification.kind != NotificationKind.outcome
        ]
        for entry in waiting[:-_MAX_PENDING_COUNT]:
            self._set_pending(entry, set())
        done = [entry.notification_id for entry in self._entries.values() if not entry.pending]
        for notification_id in done[:-_MAX_DONE_COUNT]:
            del self._entries[notification_id]
