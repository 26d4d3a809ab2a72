"""Webhooks: one signed POST request per notification, as the specification Standard Webhooks 1.0.0 defines it.

The signature is the HMAC-SHA256 of `{id}.{timestamp}.{body}`; the headers are webhook-id, webhook-timestamp and webhook-signature. A status
of 200 to 299 is a success, any other is a failure; redirects are not followed.
Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http
import http.client
import ssl
import urllib.error
import urllib.request

from swarmtrain import __version__
from swarmtrain.errors import ChannelGone, DeliveryError
from swarmtrain.notifications.channel import WebhookSecret
from swarmtrain.notifications.notification import Notification

_MAX_RESPONSE_BYTES = 65536


def sign_message(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header webhook-signature. `timestamp`: time of the attempt in seconds since the epoch."""
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def post_notification(secret: WebhookSecret, notification: Notification, timestamp: int, timeout: float) -> None:
    """Post `notification`, signed at `timestamp`, and wait for the response for at most `timeout` seconds per read.

    Raises DeliveryError, whose message does not contain the URL; ChannelGone if the receiver no longer wants notifications.
    """
    body = notification.to_body()
    headers = {
        "content-type": "application/json",
        "user-agent": f"swarmtrain/{__version__}",
        "webhook-id": notification.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign_message(secret.key, notification.id, timestamp, body),
    }
    request = urllib.request.Request(secret.url, data=body, headers=headers, method="POST")  # noqa: S310  # the scheme was checked
    try:
        with _build_opener().open(request, timeout=timeout) as response:
            response.read(_MAX_RESPONSE_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise _build_status_error(error.code) from None
    except urllib.error.URLError as error:
        raise DeliveryError(_describe_failure(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DeliveryError(_describe_failure(error)) from None


def _build_opener() -> urllib.request.OpenerDirector:
    """Return an opener that verifies TLS certificates, and has no handler for redirects: they are failures.

    The body and the signature of a request are for the URL in the secret alone.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _build_status_error(status: int) -> DeliveryError:
    if status == http.HTTPStatus.GONE:
        return ChannelGone(f"HTTP status {status}: the receiver no longer wants notifications")
    is_redirect = 300 <= status < 400
    return DeliveryError(f"HTTP status {status}{', a redirect, which is not followed' if is_redirect else ''}")


def _describe_failure(reason: object) -> str:
    """Return the reason of a failed request without the host, path or query of its URL: an error's text may contain them."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        # After a comma, the message of a mismatch names the host.
        return f"the receiver's certificate is not valid: {reason.verify_message.partition(',')[0]}"
    if isinstance(reason, TimeoutError):
        return "no response in time"
    if isinstance(reason, OSError) and reason.strerror and not isinstance(reason, ssl.SSLError):
        return reason.strerror.lower()
    return type(reason).__name__
