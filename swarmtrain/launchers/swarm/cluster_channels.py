"""Channels of notifications that the policy of the queue adds to each run: secrets of the swarm, which only its coordinator mounts."""

from __future__ import annotations

from dataclasses import replace

from swarmtrain.config.schema.queue_policy import QueuePolicy
from swarmtrain.errors import StackError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.queue.policy_store import read_policy
from swarmtrain.launchers.swarm.service_specs import ApiSpec, StackSpecs
from swarmtrain.notifications.channel import (
    CLUSTER_CHANNEL_PREFIX,
    ChannelSettings,
    decode_channels,
    encode_channels,
    name_channel_secret,
)
from swarmtrain.protocol import ENV_NOTIFY, LABEL_NOTIFY, RENDEZVOUS_SERVICE
from swarmtrain.queue_labels import ENV_QUEUE_STOP, QUEUE_STOP_TEMPLATE
from swarmtrain.render.stack_document import SECRETS_FOLDER

_NO_CHANNELS = "{}"


def add_cluster_channels(engine: DockerEngine, specs: StackSpecs) -> StackSpecs:
    """Return `specs` with a coordinator that also sends to the channels in the policy of the queue.

    A run in an internal network cannot reach them, and gets none. Raises EngineError, ConfigError; StackError if a secret is missing.
    """
    policy = read_policy(engine)
    if not policy.notify or any(network["Internal"] for network in specs.networks.values()):
        return specs
    secret_ids = find_secret_ids(engine, policy)
    name = f"{specs.stack}_{RENDEZVOUS_SERVICE}"
    return replace(specs, services={**specs.services, name: _add_channels(specs.services[name], policy, secret_ids)})


def find_secret_ids(engine: DockerEngine, policy: QueuePolicy) -> dict[str, str]:
    """Return the ids of the secrets of the channels in `policy`, by channel. Raises StackError if one is missing, EngineError."""
    ids = {item["Spec"]["Name"]: str(item["ID"]) for item in engine.list_objects("/secrets")} if policy.notify else {}
    for channel, settings in policy.notify.items():
        if settings.swarm_secret not in ids:
            raise StackError(
                f"the swarm has no secret {settings.swarm_secret}",
                place=f"queue policy notify.{channel}.swarm_secret",
                hint=f"docker secret create {settings.swarm_secret} FILE",
            )
    return {channel: ids[settings.swarm_secret] for channel, settings in policy.notify.items()}


def _add_channels(service: ApiSpec, policy: QueuePolicy, secret_ids: dict[str, str]) -> ApiSpec:
    container = service["TaskTemplate"]["ContainerSpec"]
    variables = dict(item.partition("=")[::2] for item in container["Env"])
    channels, references = list(decode_channels(variables.get(ENV_NOTIFY, ""))), list(container.get("Secrets", []))
    for name, settings in sorted(policy.notify.items()):
        channel_name = f"{CLUSTER_CHANNEL_PREFIX}{name}"
        file_name = name_channel_secret(channel_name)
        channels.append(ChannelSettings(channel_name, settings.type, settings.events, str(SECRETS_FOLDER / file_name)))
        file = {"Name": file_name, "UID": "0", "GID": "0", "Mode": 0o444}
        references.append({"File": file, "SecretName": settings.swarm_secret, "SecretID": secret_ids[name]})
    variables |= {ENV_NOTIFY: encode_channels(channels), ENV_QUEUE_STOP: QUEUE_STOP_TEMPLATE}
    new_container = {
        **container,
        "Env": sorted(f"{key}={value}" for key, value in variables.items()),
        "Secrets": sorted(references, key=lambda reference: str(reference["SecretName"])),
    }
    return {
        **service,
        "Labels": {LABEL_NOTIFY: _NO_CHANNELS, **service["Labels"]},
        "TaskTemplate": {**service["TaskTemplate"], "ContainerSpec": new_container},
    }
