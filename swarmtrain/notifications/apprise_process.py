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
from swarmtrain.notifications.notification import TEST_KIND, Notification, NotificationKind
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
if not client.notify(title=request["title"], body=request["body"], notify_type=apprise.NotifyType(request["type"])):
    sys.exit("a service did not accept the message")
"""


def check_apprise_installed() -> None:
    """Raise ChannelGone if the Python of this process lacks the package apprise."""
    if importlib.util.find_spec("apprise") is None:
        raise ChannelGone(
            "this Python lacks the package apprise: add it to the requirements.txt of the image, or run pip install 'swarmtrain[notify]'"
        )


def send_with_apprise(urls: Sequence[str], notification: Notification, timeout: float) -> None:
    """Send `notification` to the services in `urls`, within `timeout` seconds. Raises DeliveryError."""
    message = {"title": f"swarmtrain: {notification.kind}", "body": notification.message, "type": _choose_message_type(notification)}
    try:
        run_command([sys.executable, "-c", _PROGRAM], input=json.dumps({"urls": list(urls), **message}), timeout=timeout)
    except ProcessError as error:
        raise DeliveryError(_describe_failure(error)) from None
    except OSError as error:  # such as too many processes
        raise DeliveryError(f"apprise cannot be started: {error.strerror}") from None


def _choose_message_type(notification: Notification) -> str:
    """Return apprise's type of the message, for which many services have a color or an icon."""
    if notification.kind == NotificationKind.outcome:
        return "success" if notification.data.get("status") == "done" else "failure"
    return "info" if notification.kind == TEST_KIND else "warning"


def _describe_failure(error: ProcessError) -> str:
    """Return why apprise failed: its own exit message, but never its other output, which may contain URLs."""
    last_line = error.output.strip().rpartition("\n")[2]
    if error.returncode == 124:
        return "apprise did not finish in time"
    own_messages = ("apprise does not accept URL", "a service did not accept")
    return last_line if last_line.startswith(own_messages) else f"apprise failed with exit code {error.returncode}"
