"""Which of the coordinator's events are worth a notification, and what it says.

Pure. A condition that lasts, such as a straggler, is one notification: its key is remembered until the condition has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.notifications.notification import NotificationKind
from swarmtrain.protocol import (
    EVENT_DISK_NEARLY_FULL,
    EVENT_NODE_QUARANTINED,
    EVENT_OUTCOME,
    EVENT_STRAGGLER,
    Event,
    describe_outcome,
    format_run_summary,
)

_KIND_BY_EVENT = {
    EVENT_OUTCOME: NotificationKind.outcome,
    EVENT_STRAGGLER: NotificationKind.straggler,
    EVENT_NODE_QUARANTINED: NotificationKind.quarantine,
    EVENT_DISK_NEARLY_FULL: NotificationKind.disk,
}
MAX_MESSAGE_LENGTH = 1000
"""Maximum length of a notification's text, and of each value in its data: an error message may have any length, and chats limit it."""


@dataclass(frozen=True)
class NotableEvent:
    """An event that is worth a notification. `key` identifies a condition that lasts; empty: each event is a notification of its own."""

    kind: NotificationKind
    message: str
    data: Mapping[str, Any]
    key: str = ""


def find_notable_event(run: str, event: Event) -> NotableEvent | None:
    """Return what to notify about `event` of `run`; None if it is not worth a notification."""
    kind = _KIND_BY_EVENT.get(event.kind)
    if kind is None or (kind is NotificationKind.straggler and event.data.get("rank") is None):
        return None
    text, key = str(event.data.get("message")), ""
    if kind is NotificationKind.outcome:
        text = describe_outcome(event.data)
    elif kind is NotificationKind.quarantine:
        text = f"{event.data['node']} is quarantined: {event.data['reason']}"
    elif kind is NotificationKind.straggler:
        key = f"straggler {event.data.get('node')} {event.data.get('phase')}"
    elif kind is NotificationKind.disk:  # a file system that the nodes share is nearly full once
        key = f"disk {event.data.get('path')} {event.data.get('total')}"
    return NotableEvent(
        kind, _shorten(format_run_summary(run, text)), {name: _shorten_value(value) for name, value in event.data.items()}, key
    )


def is_end_of_straggler(event: Event) -> bool:
    """Return whether `event` reports that there is no longer a straggler, so that the next one is a new condition."""
    return event.kind == EVENT_STRAGGLER and event.data.get("rank") is None


def _shorten(text: str) -> str:
    """Return `text` as one line of limited length."""
    return str(_shorten_value(" ".join(text.split())))


def _shorten_value(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > MAX_MESSAGE_LENGTH
    return f"{value[: MAX_MESSAGE_LENGTH - 1]}…" if is_long else value
