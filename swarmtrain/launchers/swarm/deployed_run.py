"""Read back from the swarm what a run was deployed with: its config, its code and the digests of its secrets."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import DEPLOYED_CONTEXT
from swarmtrain.errors import StackError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.engine_values import translate_malformed_deployment
from swarmtrain.launchers.swarm import cluster_state, code_placement
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.notifications.channel import CLUSTER_CHANNEL_PREFIX, name_channel_secret
from swarmtrain.protocol import CONFIG_PATH, LABEL_HOSTS, LABEL_NOTIFY, LABEL_QUEUE_SETTINGS, RUN_KEY_NAME
from swarmtrain.render.mounts import WORKSPACE


def read_deployment(engine: DockerEngine, services: Sequence[Service], run: str) -> tuple[Config, Cargo]:
    """Return the config and the cargo with which the run of `services` was deployed. Raises StackError, EngineError.

    The contents of secrets, and of code files in a layer of the image, are unknown, and empty here.
    """
    config, cargo = read_sent_deployment(engine, services, run)
    with translate_malformed_deployment(run):
        config, code_files = code_placement.restore_code_from_layer(config, cargo.code)
    code_files.sort(key=lambda file: (file.name != config.runner.script_name, file.name))  # as in read_cargo
    return config, Cargo(tuple(code_files), cargo.secrets)


def read_sent_deployment(engine: DockerEngine, services: Sequence[Service], run: str) -> tuple[Config, Cargo]:
    """Return the config and the cargo as the nodes receive them: with the image that has the code layer, if there is one.

    Raises StackError, EngineError.
    """
    config = read_sent_config(engine, services, run)
    with translate_malformed_deployment(run):
        return config, _read_sent_cargo(engine, services, run)


def _read_sent_cargo(engine: DockerEngine, services: Sequence[Service], run: str) -> Cargo:
    files = _list_files(services, run)
    code = [(path.removeprefix(f"{WORKSPACE}/"), item) for path, item in files.items() if path != CONFIG_PATH]
    code_files = [RunFile(name, read_config_content(engine, item["ConfigID"]), _parse_digest(item["ConfigName"])) for name, item in code]
    coordinator = cluster_state.find_coordinator(list(services), run)
    containers = [_get_container(services, run), *([coordinator.spec["TaskTemplate"]["ContainerSpec"]] if coordinator else [])]
    secrets = [
        RunFile(item["File"]["Name"], b"", _parse_digest(item["SecretName"]))
        for container in containers
        for item in container.get("Secrets", [])
        # The policy of the queue may have added secrets that do not belong to the stack.
        if item["File"]["Name"] != RUN_KEY_NAME and not item["File"]["Name"].startswith(name_channel_secret(CLUSTER_CHANNEL_PREFIX))
    ]
    return Cargo(tuple(code_files), tuple(secrets))


def get_config_id(services: Sequence[Service], run: str) -> str:
    """Return the id of the config object with the config of the run. Raises StackError if the run has no nodes, or these no config."""
    with translate_malformed_deployment(run):
        return str(_list_files(services, run)[CONFIG_PATH]["ConfigID"])


def read_sent_config(engine: DockerEngine, services: Sequence[Service], run: str) -> Config:
    """Return the config as the nodes receive it, with the hosts, the settings for a queue and the channels, which only labels store.

    Raises StackError, EngineError.
    """
    with translate_malformed_deployment(run):
        config = Config.from_json(read_config_content(engine, get_config_id(services, run)).decode())
        coordinator = cluster_state.find_coordinator(list(services), run)
        config = config.restore_notify(coordinator.labels.get(LABEL_NOTIFY, "") if coordinator else "")
        return config.model_copy(update={"runner": restore_labelled_settings(config.runner, services, run)})


def restore_labelled_settings(runner: RunnerConfig, services: Sequence[Service], run: str) -> RunnerConfig:
    """Return `runner` with the settings that the nodes do not receive, from the labels of the coordinator's service.

    Raises ValueError, TypeError or RecursionError if a label is malformed.
    """
    coordinator = cluster_state.find_coordinator(list(services), run)
    labels = coordinator.labels if coordinator else {}
    hosts = [HostEntry.parse(host).text for host in json.loads(labels.get(LABEL_HOSTS, "null")) or ()]
    settings = json.loads(labels.get(LABEL_QUEUE_SETTINGS, "{}"))
    if settings:
        values = json.dumps({**runner.model_dump(mode="json"), **settings})
        runner = RunnerConfig.model_validate_json(values, context=DEPLOYED_CONTEXT)
    return runner.model_copy(update={"hosts": tuple(hosts) if hosts else None})


def read_config_content(engine: DockerEngine, config_id: str) -> bytes:
    """Return the content of a config object. Raises EngineError."""
    return base64.b64decode(engine.get(f"/configs/{config_id}")["Spec"]["Data"])


def _list_files(services: Sequence[Service], run: str) -> dict[str, dict[str, Any]]:
    """Return the config objects that a node mounts, by the path in its container."""
    return {item["File"]["Name"]: item for item in _get_container(services, run).get("Configs", [])}


def _get_container(services: Sequence[Service], run: str) -> dict[str, Any]:
    nodes = [service for service in services if service.is_node]
    if not nodes:
        raise StackError("has no nodes, only leftovers of an incomplete removal", place=f"run {run}", hint=f"swarmtrain down {run}")
    container: dict[str, Any] = nodes[0].spec["TaskTemplate"]["ContainerSpec"]
    return container


def _parse_digest(object_name: str) -> str:
    return object_name.rpartition("-")[2]
