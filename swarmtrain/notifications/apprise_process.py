"""Messages through apprise (https://github.com/caronc/apprise), which knows more than 100 services: chats, phones, email.

apprise runs as a process of its own, whose URLs come through standard input: they appear in no command line and no variable, and a library
that hangs does not stop the coordinator.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence

from swarmtrain.errors import ChannelGone, DeliveryError, ProcessError
from swarmtrain.notifications.notification import Notification
from swarmtrain.process import run_command

_PROGRAM = """
import json, logging, sys
import apprise
logging.disable(logging.CRITICAL)  # its messages contain URLs
request = json.load(sys.stdin)
client = apprise.Apprise()
for number, url in enumerate(request["urls"], start=1):
    if not client.add(url):
        sys.exit(f"apprise does not accept URL {number} of the file")
if not client.notify(title=request["title"], body=request["body"]):
    sys.exit("a service did not accept the message")
"""
MISSING_TEXT = "the image lacks apprise"
"""Text of the report of a coordinator that has channels of this type, but no package apprise."""


def send_with_apprise(urls: Sequence[str], notification: Notification, timeout: float) -> None:
    """Send `notification` to the services in `urls`, within `timeout` seconds.

    Raises DeliveryError; ChannelGone if the package apprise is missing.
    """
    if importlib.util.find_spec("apprise") is None:
        raise ChannelGone(MISSING_TEXT, hint="add swarmtrain[notify] to the image, with swarmtrain image add")
    request = json.dumps({"urls": list(urls), "title": f"swarmtrain: {notification.kind}", "body": notification.message})
    try:
        run_command([sys.executable, "-c", _PROGRAM], input=request, timeout=timeout)
    except ProcessError as error:
        raise DeliveryError(_describe_failure(error)) from None


def _describe_failure(error: ProcessError) -> str:
    """Return why apprise failed: its own exit message, but never its other output, which may contain URLs."""
    last_line = error.output.strip().rpartition("\n")[2]
    if error.returncode == 124:
        return "apprise did not finish in time"
    own_messages = ("apprise does not accept URL", "a service did not accept")
    return last_line if last_line.startswith(own_messages) else f"apprise failed with exit code {error.returncode}"
