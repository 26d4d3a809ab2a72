"""Delivery of notifications to a channel, by its type."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmtrain.notifications.apprise_process import check_apprise_installed, send_with_apprise
from swarmtrain.notifications.channel import ChannelType, parse_apprise_urls, parse_webhook_secret
from swarmtrain.notifications.notification import Notification
from swarmtrain.notifications.webhook import post_notification

DeliveryFunction = Callable[[Notification], None]
"""Function that delivers a notification. Raises DeliveryError if that fails."""
TIMEOUT_SECONDS = 10.0
"""Seconds after which an attempt has failed. A receiver that answers later gets the notification again, with the same id."""


def build_delivery(channel_type: str, secret: bytes) -> DeliveryFunction:
    """Return the function that delivers notifications to a channel of `channel_type` with the content `secret` of its secret file.

    Raises ValueError if the secret is malformed; ChannelGone if a program is missing.
    """
    if channel_type == ChannelType.apprise:
        check_apprise_installed()
        urls = parse_apprise_urls(secret)
        return lambda notification: send_with_apprise(urls, notification, TIMEOUT_SECONDS)
    webhook = parse_webhook_secret(secret)
    return lambda notification: post_notification(webhook, notification, int(time.time()), TIMEOUT_SECONDS)
