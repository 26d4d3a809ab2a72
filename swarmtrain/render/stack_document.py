"""Convert a plan to a stack document: the input of `docker stack deploy`, from which the Swarm launcher also builds service specs.

Only keys that `docker stack deploy` supports are used, so that both create the same services. The output is deterministic.
Nothing in the services depends on the *current* number of nodes: scaling does not change the other nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from swarmtrain import __version__
from swarmtrain.atomic_file import PUBLIC_MODE, SECRET_MODE, write_files_atomically
from swarmtrain.cargo import RunFile
from swarmtrain.config.schema.fields.overlay_subnet import draw_large_subnet
from swarmtrain.config.schema.runner import DockerConfig, GpuMode
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import StackError
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import (
    CONFIG_PATH,
    ENV_PREFIX,
    ENV_RUN_ID,
    LABEL_CONFIG,
    LABEL_HOST,
    LABEL_HOSTS,
    LABEL_NOTIFY,
    LABEL_QUEUE_SETTINGS,
    LABEL_ROLE,
    LABEL_RUN,
    LABEL_RUN_ID,
    LABEL_SLOTS,
    LABEL_STACK,
    RENDEZVOUS_SERVICE,
    ROLE_NODE,
    ROLE_RENDEZVOUS,
    RUN_KEY_NAME,
)
from swarmtrain.protocol.run_identity import ID_LENGTH
from swarmtrain.protocol.run_key import create_run_key
from swarmtrain.queue_labels import ENV_QUEUE_STOP, QUEUE_STOP_TEMPLATE
from swarmtrain.render.mounts import WORKSPACE, build_mounts, build_volumes, escape_go_template
from swarmtrain.render.process_environment import (
    ENTRYPOINT_MODULE,
    HIDDEN_GPUS_ENV,
    VISIBLE_DEVICES_VARIABLE,
    NodeLayout,
    build_coordinator_env,
    build_node_env,
)

NETWORK_NAME = "training"
# Swarm's own limits: docker/swarmkit refuses larger ones.
MAX_CONFIG_BYTES = 1000 * 1024
_MAX_SECRET_BYTES = 500 * 1024
_MAX_NAME_LENGTH = 64
_IPV4_PATTERN = re.compile(r"[0-9.]+")
_RESTART_DELAY = "2s"
SECRETS_FOLDER = PurePosixPath("/run/secrets")
_KEY_FILE = f"generated/{RUN_KEY_NAME}"
_GENERATED_FILE_PATTERN = re.compile(r".+-[0-9a-f]{10}(\..+)?")


RUN_VARIABLE = f"{ENV_PREFIX}RUN"
"""Environment variable with the name of the run."""
# A stack that `docker stack deploy` creates has no label with the run's id: the id of its coordinator's service is used instead.
_RUN_ID_TEMPLATE = (
    f'{{{{with index .Service.Labels "{LABEL_RUN_ID}"}}}}{{{{.}}}}{{{{else}}}}{{{{printf "%.{ID_LENGTH}s" .Service.ID}}}}{{{{end}}}}'
)
# The name with which the stack was deployed. `docker stack deploy` may use another one than the stack file, and with that name as text,
# `swarmtrain scale` would change, and restart, all services.
_RUN_TEMPLATE = f'{{{{index .Service.Labels "{LABEL_STACK}"}}}}'


@dataclass(frozen=True)
class Stack:
    """A stack document and the files that it refers to, by their relative paths."""

    name: str
    document: dict[str, Any]
    files: dict[str, bytes]
    key_file: str = ""
    """Relative path of the run's key, whose content is random: it is created once, and not among `files`. Empty: the run has no key."""
    command_template: str = "docker stack deploy -c {file} {name}"
    """Template of the command that deploys the document in the file `{file}` under the name `{name}`."""
    command_note: str = "If the registry of the image requires a login, add --with-registry-auth: the nodes then pull with your login."
    """Note on the command; empty if there is none."""


def render_stack(plan: Plan, *, is_for_swarm: bool = True) -> Stack:
    """Return the stack of `plan`, for a swarm or as the basis of a Compose file for one engine.

    Raises StackError if a file exceeds Swarm's size limit.
    """
    objects = _SwarmObjects(plan, is_for_swarm=is_for_swarm)
    services = {node.name: _build_node_service(plan, node, objects) for node in plan.nodes}
    services[RENDEZVOUS_SERVICE] = _build_rendezvous_service(plan, objects)
    document = {
        "version": "3.8",
        "x-swarmtrain": {"run": plan.run, "version": __version__, "config": objects.config_digest},
        "services": services,
        "networks": {NETWORK_NAME: _build_network(plan)},
        "configs": {key: {"file": path} for key, path in objects.configs.items()},
    }
    docker = plan.config.runner.docker_config
    if named_volumes := build_volumes(docker):
        document["volumes"] = named_volumes
    if objects.secrets:
        document["secrets"] = {key: {"file": path} for key, path in objects.secrets.items()}
    return Stack(plan.run, document, objects.files, _KEY_FILE if objects.has_run_key else "")


def render_stack_yaml(stack: Stack) -> str:
    """Return the stack document as YAML, with each `$` in a value doubled, since `docker` would expand it."""
    header = f"# Written by swarmtrain. Run it with: {stack.command_template.format(file='THIS_FILE', name=stack.name)}\n"
    header += f"# {stack.command_note}\n" if stack.command_note else ""
    return header + "".join(_iterate_yaml_sections(stack.document))


def _iterate_yaml_sections(document: dict[str, Any]) -> Iterator[str]:
    """Yield the YAML of the stack document in sections, one per service: a YAML dumper slows down with each object that it has written."""
    for key, value in document.items():
        if key != "services":
            yield _dump_yaml_section({key: value})
            continue
        yield f"{key}:\n"
        for name, service in value.items():
            yield _dump_yaml_section({key: {name: service}}).removeprefix(f"{key}:\n")


def _dump_yaml_section(section: dict[str, Any]) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(_escape_dollars(section), Dumper=dumper, sort_keys=False, width=140, allow_unicode=True))


def write_stack(stack: Stack, path: Path) -> None:
    """Write the stack document to `path` as YAML, and the files that it refers to into a folder next to it.

    Files of an earlier call that are no longer used are removed, but the run's key is kept. Raises StackError if the files cannot be
    written; then no file has changed.
    """
    secret_paths = _list_secret_paths(stack)
    folder = path.parent / _get_files_folder(stack)
    try:
        files = {
            path.parent / name: (content, SECRET_MODE if name in secret_paths else PUBLIC_MODE) for name, content in stack.files.items()
        }
        if stack.key_file and not (path.parent / stack.key_file).exists():
            files[path.parent / stack.key_file] = (create_run_key(), SECRET_MODE)
            files[folder / ".gitignore"] = (f"{RUN_KEY_NAME}\n".encode(), PUBLIC_MODE)
        write_files_atomically({**files, path: (render_stack_yaml(stack).encode(), SECRET_MODE)})  # it contains the values of runner.env
        folder.chmod(0o700)  # containers of any user must be able to read the config in it
        # The stack file is written last, so that it refers only to existing files even if this function is interrupted.
        for file in folder.iterdir():
            if _GENERATED_FILE_PATTERN.fullmatch(file.name) and f"{_get_files_folder(stack)}/{file.name}" not in stack.files:
                file.unlink()
    except OSError as error:
        raise StackError(
            f"the stack file cannot be written: {describe_os_error(error)}", place=str(path), hint="write it elsewhere with --output FILE"
        ) from None


class _SwarmObjects:
    """Configs and secrets of a stack: the file of each key in the document, and the content of each file.

    `has_run_key`: whether the run has a key, because it joins a network on which others can reach its ports.
    """

    def __init__(self, plan: Plan, *, is_for_swarm: bool) -> None:
        self.is_for_swarm = is_for_swarm
        self.has_run_key = is_for_swarm and plan.config.runner.swarm.network is not None
        self.files: dict[str, bytes] = {}
        self.configs: dict[str, str] = {}
        self.secrets: dict[str, str] = {}
        self.config_mounts: list[dict[str, Any]] = []
        self.secret_mounts: list[dict[str, Any]] = []
        self.channel_mounts: list[dict[str, Any]] = []
        config_file = RunFile.from_content("config.json", plan.config.to_node_config().to_json().encode())
        self.config_digest = config_file.digest
        self._max_stem_length = _MAX_NAME_LENGTH - len(f"{plan.run}_-{config_file.digest}")
        self._add_config_or_secret(config_file, CONFIG_PATH, self.configs, self.config_mounts, "config, with all defaults")
        for item in plan.cargo.code:
            self._add_config_or_secret(item, str(WORKSPACE / item.name), self.configs, self.config_mounts, f"file {item.name}")
        if self.has_run_key:
            self.secrets[RUN_KEY_NAME] = _KEY_FILE
            self.secret_mounts.append({"source": RUN_KEY_NAME, "target": RUN_KEY_NAME})
        for item in plan.cargo.node_secrets:
            self._add_config_or_secret(item, item.name, self.secrets, self.secret_mounts, f"config runner.secrets.{item.name}")
        for item in plan.cargo.channel_secrets:
            self._add_config_or_secret(
                item, item.name, self.secrets, self.channel_mounts, f"config {item.name.replace('-', '.', 1)}.secret"
            )

    def _add_config_or_secret(
        self, run_file: RunFile, mount_target: str, files_by_key: dict[str, str], object_mounts: list[dict[str, Any]], place: str
    ) -> None:
        is_secret = files_by_key is self.secrets
        limit = _MAX_SECRET_BYTES if is_secret else MAX_CONFIG_BYTES
        if self.is_for_swarm and len(run_file.content) >= limit:
            raise StackError(
                f"{len(run_file.content) / 1024:.0f} KiB, but Swarm accepts less than {limit // 1024} KiB",
                place=place,
                hint=f"{'' if is_secret else 'add it to the image with swarmtrain image add, or '}put it on a disk that is mounted with "
                f"docker_mounts",
            )
        path_in_code = PurePosixPath(run_file.name)
        stem, dot, suffix = path_in_code.name.partition(".")
        key = f"{_sanitize_object_name(str(path_in_code.parent / stem))[-self._max_stem_length :]}-{run_file.digest}"
        path = f"generated/{key}{dot}{suffix}"
        self.files[path] = run_file.content
        files_by_key[key] = path
        object_mounts.append({"source": key, "target": mount_target})


def _sanitize_object_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", stem)[-40:] or "file"


def _build_node_service(plan: Plan, node: PlannedNode, swarm_objects: _SwarmObjects) -> dict[str, Any]:
    runner = plan.config.runner
    constraints = [node.constraint, *(f"node.labels.{key}=={value}" for key, value in sorted(runner.swarm.labels.items()))]
    environment = build_node_env(plan, node, _build_node_layout(plan, swarm_objects))
    environment.setdefault(VISIBLE_DEVICES_VARIABLE, _format_visible_devices(plan, node))
    if runner.swarm.rdma:
        environment.setdefault("NVIDIA_MOFED", "enabled")
    service = _build_common_service(plan, plan.role, environment)
    if runner.docker_config.user:
        service["user"] = runner.docker_config.user
    service["configs"] = swarm_objects.config_mounts
    if swarm_objects.secret_mounts:
        service["secrets"] = swarm_objects.secret_mounts
    service["volumes"] = build_mounts(runner.docker_config)
    if runner.swarm.rdma:
        # RDMA adapters need memory that cannot be paged out; the runtime adds their devices.
        service["ulimits"] = {"memlock": -1}
        service["cap_add"] = ["IPC_LOCK"]
    service["deploy"] = _build_deploy_section(
        plan, swarm_objects, ROLE_NODE, constraints, {LABEL_HOST: node.host, LABEL_SLOTS: str(node.slots)}
    )
    resources = _build_resources(plan, node)
    if resources:
        service["deploy"]["resources"] = resources
    return service


def _build_rendezvous_service(plan: Plan, swarm_objects: _SwarmObjects) -> dict[str, Any]:
    environment = build_coordinator_env(plan, _build_node_layout(plan, swarm_objects)) | HIDDEN_GPUS_ENV
    service = _build_common_service(plan, "rendezvous", environment)
    service["environment"][ENV_RUN_ID] = _RUN_ID_TEMPLATE
    if plan.config.notify and swarm_objects.is_for_swarm:
        service["environment"][ENV_QUEUE_STOP] = QUEUE_STOP_TEMPLATE
    key_mounts = [{"source": RUN_KEY_NAME, "target": RUN_KEY_NAME}] if swarm_objects.has_run_key else []
    if mounts := [*key_mounts, *swarm_objects.channel_mounts]:
        service["secrets"] = mounts
    service["deploy"] = _build_deploy_section(
        plan, swarm_objects, ROLE_RENDEZVOUS, _build_coordinator_constraints(plan), {LABEL_HOSTS: json.dumps(plan.config.runner.hosts)}
    )
    if queue_settings := plan.config.runner.queue_settings:
        service["deploy"]["labels"][LABEL_QUEUE_SETTINGS] = json.dumps(queue_settings, sort_keys=True)
    if channels := plan.config.dump_notify():
        service["deploy"]["labels"][LABEL_NOTIFY] = channels
    return service


def _build_home_env(docker_config: DockerConfig) -> dict[str, str]:
    """Return the variable HOME, set to a writable folder; empty if the config sets no user.

    Without this variable, HOME is / for a user without an account in the image.
    """
    return {"HOME": docker_config.cache_dir or "/tmp"} if docker_config.user else {}  # in the container, which has its own /tmp


def _build_coordinator_constraints(plan: Plan) -> list[str]:
    if plan.coordinator_machine is None:
        return ["node.role==manager"]
    if plan.coordinator_machine.id:
        return ["node.role==manager", f"node.id=={plan.coordinator_machine.id}"]
    key = "node.ip" if _IPV4_PATTERN.fullmatch(plan.coordinator_machine.host) else "node.hostname"
    return ["node.role==manager", f"{key}=={plan.coordinator_machine.host}"]


def _build_node_layout(plan: Plan, swarm_objects: _SwarmObjects) -> NodeLayout:
    docker = plan.config.runner.docker_config
    address = plan.coordinator_machine.address if plan.coordinator_machine else ""
    return NodeLayout(
        coordinator_host=address or RENDEZVOUS_SERVICE,
        # In the run's own network, nobody else can reach the coordinator. Elsewhere it binds only to its own address, except for a host
        # name, which may resolve to loopback on the machine itself.
        bind_address=address if _IPV4_PATTERN.fullmatch(address) else "0.0.0.0",
        config_path=CONFIG_PATH,
        code_folder=WORKSPACE,
        secrets_dir=SECRETS_FOLDER,
        key_file=str(SECRETS_FOLDER / RUN_KEY_NAME) if swarm_objects.has_run_key else "",
        log_dir="/tmp/swarmtrain",
        coordinator_port=plan.master_port,
        mounts=tuple(target for _, target in docker.docker_mounts),
        environment={**docker.cache_variables, **_build_home_env(docker)},
    )


def _build_common_service(plan: Plan, role: str, environment: dict[str, str]) -> dict[str, Any]:
    return {
        "image": plan.config.runner.docker_config.docker_container,
        "entrypoint": ["python3", "-m", ENTRYPOINT_MODULE],
        "command": [role],
        "init": True,
        "environment": {name: escape_go_template(value) for name, value in environment.items()} | {RUN_VARIABLE: _RUN_TEMPLATE},
        "networks": [NETWORK_NAME],
        "stop_grace_period": f"{plan.config.runner.stop_grace:g}s",
        "logging": {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}},
    }


def _build_deploy_section(
    plan: Plan, swarm_objects: _SwarmObjects, role: str, constraints: list[str], labels: dict[str, str]
) -> dict[str, Any]:
    return {
        "mode": "replicated",
        "replicas": 1,
        # A virtual IP drops idle connections after 900 s.
        "endpoint_mode": "dnsrr",
        "labels": {LABEL_RUN: plan.run, LABEL_ROLE: role, LABEL_CONFIG: swarm_objects.config_digest, **labels},
        "placement": {"constraints": constraints},
        # A task is restarted after every exit code except 0. The coordinator enforces the restart budget.
        "restart_policy": {"condition": "on-failure", "delay": _RESTART_DELAY},
        "update_config": {"parallelism": 1, "order": "stop-first", "failure_action": "continue"},
    }


def _format_visible_devices(plan: Plan, node: PlannedNode) -> str:
    """Return the value of NVIDIA_VISIBLE_DEVICES, which selects the GPUs that NVIDIA's container runtime shows in the container."""
    if plan.gpu_mode is GpuMode.none:
        return HIDDEN_GPUS_ENV[VISIBLE_DEVICES_VARIABLE]
    # An NVIDIA Container Toolkit that is configured for Swarm's assignments prefers them to `all`; without it, the supervisor selects GPUs.
    return ",".join(node.gpus) or "all"


def _build_resources(plan: Plan, node: PlannedNode) -> dict[str, Any]:
    docker, swarm = plan.config.runner.docker_config, plan.config.runner.swarm
    resources: dict[str, Any] = {}
    limits = {}
    if docker.cpus is not None:
        limits["cpus"] = f"{docker.cpus:g}"
    if docker.memory is not None:
        limits["memory"] = str(docker.memory)
    if limits:
        resources["limits"] = limits
    if plan.gpu_mode is GpuMode.reserve:
        resources["reservations"] = {
            "generic_resources": [{"discrete_resource_spec": {"kind": swarm.generic_resource, "value": node.slots}}]
        }
    return resources


def _build_network(plan: Plan) -> dict[str, Any]:
    swarm = plan.config.runner.swarm
    if swarm.network:
        return {"external": True, "name": swarm.network}
    # The store has no authentication: no other container may join.
    network: dict[str, Any] = {"driver": "overlay", "attachable": False}
    options = {}
    if swarm.mtu:
        options["com.docker.network.driver.mtu"] = str(swarm.mtu)
    if swarm.encrypted:
        options["encrypted"] = "true"
    if swarm.internal:
        network["internal"] = True
    if options:
        network["driver_opts"] = options
    if subnet := swarm.subnet or draw_large_subnet(plan.run, plan.max_nodes):
        network["ipam"] = {"config": [{"subnet": subnet}]}
    return network


def _escape_dollars(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _escape_dollars(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_dollars(item) for item in value]
    return value


def _get_files_folder(stack: Stack) -> str:
    return next(iter(stack.files)).partition("/")[0]


def _list_secret_paths(stack: Stack) -> set[str]:
    return {secret["file"] for secret in stack.document.get("secrets", {}).values()}
