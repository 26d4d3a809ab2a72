"""Send test notifications from this machine, to check the channels of a config before a run depends on them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from swarmtrain.cargo import read_channel_secrets
from swarmtrain.config import Config
from swarmtrain.errors import DeliveryError, SwarmtrainError
from swarmtrain.notifications.channel import CHANNEL_SECRET_PREFIX
from swarmtrain.notifications.delivery import build_delivery
from swarmtrain.notifications.notification import TEST_KIND, Notification
from swarmtrain.protocol.run_identity import find_current_owner

_ID_BYTES = 8


def send_test_notifications(config: Config, working_folder: Path) -> Iterator[str]:
    """Send a test notification to each channel of `config`, and yield a line of text about each delivery.

    The paths of secrets are relative to `working_folder`. Raises SwarmtrainError about the channels that failed, after all others were
    tried.
    """
    if not config.notify:
        raise SwarmtrainError("has no channels", place="config notify", hint="docs/how-to/notify.md shows the section")
    message = f"test notification of {find_current_owner()}: no run is concerned"
    notification = Notification(f"test-{secrets.token_hex(_ID_BYTES)}", TEST_KIND, "test", time.time(), message)
    failures = []
    for item in read_channel_secrets(config, working_folder):
        name = item.name.removeprefix(CHANNEL_SECRET_PREFIX)
        try:
            build_delivery(config.notify[name].type, item.content)(notification)
        except DeliveryError as error:
            failures.append(f"{name}: {error}")
        else:
            yield f"{name}: delivered"
    if failures:
        raise SwarmtrainError("; ".join(failures), place="config notify", hint="the receiver must answer with a status from 200 to 299")
