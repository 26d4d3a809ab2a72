"""Delivers the notifications of a run: one thread per channel, so that a slow receiver delays neither the run nor the other channels."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmtrain.entrypoint.coordinator.notification_events import find_notable_event, is_end_of_straggler
from swarmtrain.entrypoint.coordinator.notification_ledger import NotificationLedger
from swarmtrain.entrypoint.coordinator.rendezvous_barrier import COORDINATOR_WARMUP_SECONDS
from swarmtrain.errors import ChannelGone, DeliveryError
from swarmtrain.notifications.channel import ChannelSettings
from swarmtrain.notifications.delivery import DeliveryFunction, build_delivery
from swarmtrain.notifications.notification import Notification, NotificationKind
from swarmtrain.protocol import Event, format_run_summary
from swarmtrain.queue_labels import QueueStop

_POLL_SECONDS = 0.1
_RETRY_SECONDS = (0.5, 60.0)
"""Minimum and maximum seconds between two attempts; each failed attempt doubles them."""
_MAX_RETRY_SECONDS_AFTER_OUTCOME = 1.0


class Notifier:
    """Creates the notifications of a run from its events, and delivers them in the background.

    `report_note` logs a line for the user; it is called without a lock of this class. `boot_id` distinguishes the notifications of this
    process from those of an earlier coordinator.
    """

    def __init__(
        self, run: str, run_id: str, boot_id: str, channels: Sequence[ChannelSettings], report_note: Callable[[str], None]
    ) -> None:
        self._run, self._run_id, self._boot_id = run, run_id or run, boot_id
        self._channels, self._report_note = channels, report_note
        names: dict[str, list[str]] = {kind: [channel.name for channel in channels if kind in channel.events] for kind in NotificationKind}
        self._ledger = NotificationLedger(names, time.monotonic)
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._waiting_events: list[tuple[Event, float]] = []
        self._count = 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to deliver."""
        with self._lock:
            return not self._channels or not (self._waiting_events or self._ledger.has_pending_notifications)

    def start(self) -> None:
        """Start the threads. A channel whose secret cannot be used is reported, and gets no notifications."""
        for channel in self._channels:
            try:
                deliver = build_delivery(channel.type, Path(channel.file).read_bytes())
            except (OSError, ValueError, DeliveryError) as error:
                self._drop_channel(channel.name, error.strerror or "" if isinstance(error, OSError) else str(error))
                continue
            threading.Thread(target=self._deliver_forever, args=(channel.name, deliver), name=f"notify {channel.name}", daemon=True).start()

    def observe_event(self, event: Event) -> None:
        """Create a notification about `event` if it is worth one, and return at once."""
        if self._channels:
            with self._lock:
                self._waiting_events.append((event, time.monotonic()))
                self._create_notifications()

    def notify_queue_stop(self, stop: QueueStop) -> None:
        """Create a notification that the queue has stopped the run. Its id is the same if another coordinator creates it again."""
        kind = NotificationKind.preemption if stop.resumes else NotificationKind.stop
        steps = f"{stop.lost_steps} steps are lost" if stop.lost_steps else "no step is lost"
        message = format_run_summary(self._run, f"{stop.reason}; {steps}{', and it resumes by itself' if stop.resumes else ''}")
        data = {"reason": stop.reason, "lost_steps": stop.lost_steps}
        notification = Notification(f"{self._run_id}-{kind}-{stop.time:.0f}", kind, self._run, stop.time, message, data)
        with self._lock:
            self._ledger.add_notification(notification, time.monotonic())

    def merge_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Merge the copy of the ledger that a node has sent. A malformed copy is ignored: the node's request counts nevertheless."""
        with self._lock, contextlib.suppress(KeyError, TypeError, ValueError):
            self._ledger.merge_records(records)

    def export_records(self) -> list[dict[str, Any]]:
        """Return the copy of the ledger for a node."""
        with self._lock:
            return self._ledger.export_records()

    def process_timeouts(self) -> None:
        """Create the notifications of new events, and give up what cannot be delivered in time."""
        with self._lock:
            self._create_notifications()
            given_up = self._ledger.give_up_deliveries()
        for channel, notification_id in given_up:
            self._report_note(f"channel {channel}: gave up the delivery of notification {notification_id}")

    def _create_notifications(self) -> None:
        """Create the notifications of the events so far.

        Until the nodes have sent their copies, this coordinator does not know what an earlier one has notified about.
        """
        if time.monotonic() - self._started_at >= COORDINATOR_WARMUP_SECONDS:
            for event, observed_at in self._waiting_events:
                self._add_notification(event, observed_at)
            self._waiting_events.clear()

    def _add_notification(self, event: Event, observed_at: float) -> None:
        if is_end_of_straggler(event):
            self._ledger.forget_keys("straggler ")
        notable = find_notable_event(self._run, event)
        if notable is None or (notable.key and self._ledger.has_key(notable.key)):
            return
        self._count += 1
        notification_id = f"{self._run_id}-{self._boot_id}-{self._count}"
        notification = Notification(notification_id, notable.kind, self._run, event.time, notable.message, dict(notable.data))
        self._ledger.add_notification(notification, observed_at, notable.key)

    def _deliver_forever(self, channel: str, deliver: DeliveryFunction) -> None:
        """Deliver the notifications of `channel`. A failed delivery is retried with the same id, after those that wait behind it."""
        # Each node sends its copy before: an older copy alone would name what the newer one of another node shows to be delivered.
        time.sleep(max(0.0, self._started_at + COORDINATOR_WARMUP_SECONDS - time.monotonic()))
        failed_attempts = 0
        while True:
            with self._lock:
                notification = self._ledger.find_due_notification(channel)
            if notification is None:
                time.sleep(_POLL_SECONDS)
                continue
            try:
                deliver(notification)
            except ChannelGone as error:
                self._drop_channel(channel, error.message)
                return
            except DeliveryError as error:
                failed_attempts += 1
                if failed_attempts == 1:
                    self._report_note(f"channel {channel}: notification {notification.id} was not delivered, and is retried: {error}")
                with self._lock:
                    self._ledger.postpone(notification.id)
                self._wait_for_retry(failed_attempts)
                continue
            failed_attempts = 0
            with self._lock:
                self._ledger.mark_delivered(notification.id, channel)

    def _wait_for_retry(self, failed_attempts: int) -> None:
        """Wait before the next attempt. After the outcome, attempts are more frequent, since there is little time."""
        minimum, maximum = _RETRY_SECONDS
        seconds = min(maximum, minimum * 2 ** min(failed_attempts - 1, 10))
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            with self._lock:
                is_urgent = self._ledger.is_outcome_known
            if is_urgent and seconds - remaining >= _MAX_RETRY_SECONDS_AFTER_OUTCOME:
                return
            time.sleep(min(_POLL_SECONDS, remaining))

    def _drop_channel(self, channel: str, reason: str) -> None:
        with self._lock:
            self._ledger.drop_channel(channel)
        self._report_note(f"channel {channel}: gets no notifications: {reason}")
