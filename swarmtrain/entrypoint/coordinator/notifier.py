"""Delivers the notifications of a run: one thread per channel, so that a slow receiver delays neither the run nor the other channels.

A notification is delivered at least once while this process lives, and nothing is stored. A coordinator that replaces a lost one notifies
the outcome that it adopts from a node again, with the same id, which receivers use to drop it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from swarmtrain.entrypoint.coordinator.notification_events import find_notable_event, is_end_of_straggler
from swarmtrain.errors import ChannelGone, DeliveryError
from swarmtrain.notifications.channel import ChannelSettings
from swarmtrain.notifications.delivery import DeliveryFunction, build_delivery
from swarmtrain.notifications.notification import Notification, NotificationKind
from swarmtrain.protocol import Event, format_run_summary
from swarmtrain.queue_labels import QueueStop

OUTCOME_DELIVERY_SECONDS = 5.0
"""Seconds after the outcome in which notifications are delivered. Then the coordinator gives up, so that the run can end."""
MAX_QUEUED_NOTIFICATIONS = 100
"""Maximum number of notifications that wait for a channel. Beyond it, the oldest are given up."""
_RETRY_SECONDS = (0.5, 60.0)
"""Minimum and maximum seconds between two attempts; each failed attempt doubles them."""
_MAX_RETRY_SECONDS_AFTER_OUTCOME = 1.0


class Notifier:
    """Creates the notifications of a run from its events, and delivers them in the background.

    `report_note` logs a line for the user; it is called without a lock of this class. `boot_id` distinguishes the notifications of this
    process from those of an earlier coordinator. All methods are called in one thread.
    """

    def __init__(
        self, run: str, run_id: str, boot_id: str, channels: Sequence[ChannelSettings], report_note: Callable[[str], None]
    ) -> None:
        self._run, self._run_id, self._boot_id = run, run_id or run, boot_id
        self._channels, self._report_note = channels, report_note
        self._queues: dict[str, deque[Notification]] = {channel.name: deque(maxlen=MAX_QUEUED_NOTIFICATIONS) for channel in channels}
        self._changed = threading.Condition()
        """Guards the queues, from which a notification is removed once it is delivered."""
        self._lasting_conditions: set[str] = set()
        self._count = 0
        self._give_up_at = math.inf

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to deliver."""
        with self._changed:
            return not any(self._queues.values())

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
        """Create a notification about `event` if it is worth one, and return at once.

        The id of an outcome consists of facts that a coordinator adopts with it. Another event is observed by one coordinator only.
        """
        if is_end_of_straggler(event):
            self._lasting_conditions = {key for key in self._lasting_conditions if not key.startswith("straggler ")}
        notable = find_notable_event(self._run, event)
        if notable is None or notable.key in self._lasting_conditions:
            return
        if notable.key:
            self._lasting_conditions.add(notable.key)
        self._count += 1
        fact = event.data["round"] if notable.kind is NotificationKind.outcome else f"{self._boot_id}-{self._count}"
        notification_id = f"{self._run_id}-{notable.kind}-{fact}"
        self._add_notification(Notification(notification_id, notable.kind, self._run, event.time, notable.message, dict(notable.data)))

    def notify_queue_stop(self, stop: QueueStop) -> None:
        """Create a notification that the queue has stopped the run. Its id is the same if another coordinator creates it again."""
        kind = NotificationKind.preemption if stop.resumes else NotificationKind.stop
        steps = f"{stop.lost_steps} steps are lost" if stop.lost_steps else "no step is lost"
        message = format_run_summary(self._run, f"{stop.reason}; {steps}{', and it resumes by itself' if stop.resumes else ''}")
        data = {"reason": stop.reason, "lost_steps": stop.lost_steps}
        self._add_notification(Notification(f"{self._run_id}-{kind}-{stop.time:.0f}", kind, self._run, stop.time, message, data))

    def process_timeouts(self) -> None:
        """Give up what was not delivered in time after the outcome."""
        if time.monotonic() < self._give_up_at:
            return
        with self._changed:
            given_up = [(channel, notification.id) for channel, queue in self._queues.items() for notification in queue]
            for queue in self._queues.values():
                queue.clear()
        for channel, notification_id in given_up:
            self._report_note(f"channel {channel}: gave up the delivery of notification {notification_id}")

    def _add_notification(self, notification: Notification) -> None:
        with self._changed:
            if notification.kind == NotificationKind.outcome:
                self._give_up_at = time.monotonic() + OUTCOME_DELIVERY_SECONDS
            for channel in self._channels:
                if channel.name in self._queues and notification.kind in channel.events:
                    self._queues[channel.name].append(notification)
            self._changed.notify_all()

    def _deliver_forever(self, channel: str, deliver: DeliveryFunction) -> None:
        """Deliver the notifications of `channel`. A failed delivery is retried with the same id, after those that wait behind it."""
        queue, failed_attempts = self._queues[channel], 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue)
                notification = min(queue, key=lambda item: item.kind != NotificationKind.outcome)  # the oldest, but an outcome first
            try:
                deliver(notification)
                failed_attempts = 0
            except ChannelGone as error:
                self._drop_channel(channel, error.message)
                return
            except DeliveryError as error:
                failed_attempts += 1
                if failed_attempts == 1:
                    self._report_note(f"channel {channel}: notification {notification.id} was not delivered, and is retried: {error}")
            with self._changed:
                if notification in queue:  # it was not given up meanwhile
                    queue.remove(notification)
                    if failed_attempts:
                        queue.append(notification)
                        self._wait_for_retry(failed_attempts)

    def _wait_for_retry(self, failed_attempts: int) -> None:
        """Wait before the next attempt, with the lock. After the outcome, attempts are more frequent, since there is little time."""
        minimum, maximum = _RETRY_SECONDS
        seconds = min(maximum, minimum * 2 ** min(failed_attempts - 1, 10))
        if self._give_up_at == math.inf:
            self._changed.wait_for(lambda: self._give_up_at < math.inf, seconds)
        else:
            self._changed.wait(min(seconds, _MAX_RETRY_SECONDS_AFTER_OUTCOME))

    def _drop_channel(self, channel: str, reason: str) -> None:
        with self._changed:
            del self._queues[channel]
        self._report_note(f"channel {channel}: gets no notifications: {reason}")
