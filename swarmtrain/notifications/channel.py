"""Channels: where notifications go. The coordinator receives a channel's settings in a variable, and its secret as a file.

launcher --variable SWARMTRAIN_NOTIFY: the settings of all channels, without secrets--> coordinator
launcher --a file for each channel: its URL and key--> coordinator
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from urllib.parse import urlsplit

CHANNEL_SECRET_PREFIX = "notify-"  # noqa: S105  # the start of a file's name
"""Start of the names of the channels' secrets. The names of other secrets are names of variables, which contain no hyphen."""
CLUSTER_CHANNEL_PREFIX = "cluster-"
"""Start of the names of channels that the policy of a queue adds to each run."""
_KEY_PREFIX = "whsec_"
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 24, 64


class ChannelType(StrEnum):
    """How the notifications of a channel are delivered."""

    webhook = "webhook"
    apprise = "apprise"


@dataclass(frozen=True)
class ChannelSettings:
    """Settings of a channel, without its secret."""

    name: str
    type: str
    events: tuple[str, ...]
    """Kinds of notifications that the channel receives."""
    file: str
    """Path of the file with the channel's secret, as the coordinator sees it."""


@dataclass(frozen=True, repr=False)
class WebhookSecret:
    """Secret of a webhook: the URL, and the key that signs requests. It has no repr, so that no log or traceback contains it."""

    url: str
    key: bytes


def encode_channels(channels: Iterable[ChannelSettings]) -> str:
    """Return the value of the variable with the settings of `channels`."""
    return json.dumps([asdict(channel) for channel in channels], sort_keys=True)


def decode_channels(text: str) -> tuple[ChannelSettings, ...]:
    """Return the channels in the value `text` of the variable; none if it is empty. Raises ValueError if it is malformed."""
    try:
        return tuple(ChannelSettings(**{**item, "events": tuple(item["events"])}) for item in json.loads(text or "[]"))
    except (TypeError, KeyError) as error:
        raise ValueError(f"malformed channel: {error}") from None


def name_channel_secret(channel_name: str) -> str:
    """Return the name of the secret of a channel, as a file."""
    return f"{CHANNEL_SECRET_PREFIX}{channel_name}"


def check_secret(channel_type: str, content: bytes) -> None:
    """Check the content of the file with a channel's secret. Raises ValueError, with a reason that contains nothing of the content."""
    if channel_type == ChannelType.webhook:
        parse_webhook_secret(content)
    else:
        parse_apprise_urls(content)


def parse_webhook_secret(content: bytes) -> WebhookSecret:
    """Return the webhook in the content of a secret file: the URL in the first line, the key in the second.

    Blank lines, and lines that begin with #, are skipped. Raises ValueError if the content is malformed; the message contains none of it.
    """
    lines = _list_lines(content)
    if len(lines) != 2:
        raise ValueError(f"a webhook's file must have two lines, the URL and the key, not {len(lines)}")
    url, key = lines
    _check_http_url(url)
    return WebhookSecret(url, _decode_key(key))


def parse_apprise_urls(content: bytes) -> tuple[str, ...]:
    """Return the URLs of apprise in the content of a secret file, one in each line. Raises ValueError if there are none."""
    urls = tuple(_list_lines(content))
    if not urls:
        raise ValueError("the file must have an apprise URL in each line, but it has none")
    for number, url in enumerate(urls, start=1):
        if "://" not in url:
            raise ValueError(f"URL {number} of the file is not an apprise URL: it has no scheme such as ntfys://")
    return urls


def _list_lines(content: bytes) -> list[str]:
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        raise ValueError("the file is not text in UTF-8") from None
    return [line for line in lines if line and not line.startswith("#")]


def _check_http_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid or any(char.isspace() or not char.isprintable() or not char.isascii() for char in url):
        raise ValueError("the first line is not a URL that begins with https:// or http://")
    if parts.username is not None:
        raise ValueError("the URL has a user name or a password, which are not sent: requests are signed instead")


def _decode_key(key: str) -> bytes:
    """Return the bytes of a key in the notation of Standard Webhooks: whsec_ and base64. Raises ValueError."""
    try:
        decoded = base64.b64decode(key.removeprefix(_KEY_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        decoded = b""
    if not key.startswith(_KEY_PREFIX) or not _MIN_KEY_BYTES <= len(decoded) <= _MAX_KEY_BYTES:
        raise ValueError(f"the second line is not a key: {_KEY_PREFIX} and the base64 of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} random bytes")
    return decoded
