"""Channels in the section `notify`, of a config and of the policy of a queue: where notifications about runs go, and which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from swarmtrain.config.schema.section import Section
from swarmtrain.notifications.channel import CLUSTER_CHANNEL_PREFIX, ChannelType
from swarmtrain.notifications.notification import NotificationKind

_CHANNEL_NAME_PATTERN = re.compile(r"[a-z][a-z0-9-]{0,30}")


def _check_channel_name(name: str) -> str:
    if not _CHANNEL_NAME_PATTERN.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name of a channel: use at most 31 characters of a-z, 0-9 and -, and begin with a letter")
    if name.startswith(CLUSTER_CHANNEL_PREFIX):
        raise ValueError(f"{name!r}: names that begin with {CLUSTER_CHANNEL_PREFIX} are those of channels in the policy of a queue")
    return name


def _check_events(events: tuple[NotificationKind, ...]) -> tuple[NotificationKind, ...]:
    if not events:
        raise ValueError("must name at least one event; remove the channel if it is not used")
    return tuple(dict.fromkeys(events))


ChannelName = Annotated[str, AfterValidator(_check_channel_name)]
NotificationKinds = Annotated[tuple[NotificationKind, ...], AfterValidator(_check_events)]


class ChannelConfig(Section):
    """How the notifications of a channel are delivered, and which it gets."""

    type: ChannelType = Field(
        ChannelType.webhook,
        description="webhook: a signed POST request, as Standard Webhooks specifies it. apprise: a message to a chat, a phone or an email "
        "address, through apprise, which the image must contain.",
    )
    events: NotificationKinds = Field(
        tuple(NotificationKind),
        description="Events to notify about: the run's outcome, its preemption in the queue, another stop by the queue, a straggler, "
        "a quarantined node, and a disk that is nearly full.",
    )


class NotifyChannelConfig(ChannelConfig):
    """A channel of a run."""

    secret: Path = Field(
        description="File with the secret of the channel. Of a webhook: the URL in the first line, the key in the second, as whsec_ and "
        "the base64 of at least 24 random bytes. Of apprise: a URL in each line. Only the coordinator receives the file."
    )


class ClusterChannelConfig(ChannelConfig):
    """A channel of all runs in a queue."""

    swarm_secret: str = Field(
        min_length=1,
        description="Name of a secret of the swarm (docker secret create). Its content is that of the file of a channel of a run.",
    )
