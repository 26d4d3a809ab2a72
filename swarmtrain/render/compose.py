"""Plan → stack document: what `docker stack deploy` takes, and what the Swarm launcher turns into service specs.

Only keys that `docker stack deploy` honours are used, so that both ways give the same services. The same plan gives the
same bytes. What depends on how many nodes there are *now* stays out of the services: scaling leaves the others as they are.
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
from swarmtrain.config.files import OPEN, SECRET, reason, write_all
from swarmtrain.config.runner import DockerConfig, GpuMode
from swarmtrain.errors import StackError
from swarmtrain.plan import CodeFile, Plan, PlannedNode
from swarmtrain.render.command import MODULE, Place, board_env, node_env
from swarmtrain.render.mounts import WORKSPACE, mounts, untemplated, volumes
from swarmtrain.wire import (
    CONFIG_PATH,
    LABEL_CONFIG,
    LABEL_HOST,
    LABEL_HOSTS,
    LABEL_ROLE,
    LABEL_RUN,
    LABEL_SLOTS,
    RENDEZVOUS,
    ROLE_NODE,
    ROLE_RENDEZVOUS,
)

NETWORK = "training"
# Swarm's own limits: docker/swarmkit refuses larger ones.
_MAX_CONFIG = 1000 * 1024
_MAX_SECRET = 500 * 1024
_LONGEST_NAME = 64
# An overlay is a /24 unless told otherwise, and each node takes two of its addresses: a task's and a load balancer's.
_NODES_IN_24 = 100
_WIDE_SUBNET = "10.128.0.0/16"
_ADDRESS = re.compile(r"[0-9.]+")
# On the machines' own network a container that is started again has the name and the process id of the one before: until
# the agents have forgotten that (6 s), they would take it for its own dead self.
_DELAY, _DELAY_ON_HOST = "2s", "8s"
_WRITTEN_BY_US = re.compile(r".+-[0-9a-f]{10}(\..+)?")


@dataclass(frozen=True)
class Stack:
    """A stack document and the files that it refers to, by the relative path it uses."""

    name: str
    document: dict[str, Any]
    files: dict[str, bytes]
    command: str = "docker stack deploy -c {file} {name}"
    """What runs it, once it is in a `file`."""


def stack(plan: Plan) -> Stack:
    """Return the stack of `plan`. Raises StackError for a file that is empty, or over Swarm's limit."""
    cargo = _Cargo(plan)
    services = {node.name: _node_service(plan, node, cargo) for node in plan.nodes}
    services[RENDEZVOUS] = _rendezvous_service(plan, cargo)
    document = {
        "version": "3.8",
        "x-swarmtrain": {"run": plan.run, "version": __version__, "config": cargo.config_digest},
        "services": services,
        "networks": {NETWORK: _network(plan)},
        "configs": {key: {"file": path} for key, path in cargo.configs.items()},
    }
    docker = plan.config.runner.docker_config
    if named := volumes(docker):
        document["volumes"] = named
    if cargo.secrets:
        document["secrets"] = {key: {"file": path} for key, path in cargo.secrets.items()}
    return Stack(plan.run, document, cargo.files)


def to_yaml(stack: Stack) -> str:
    """Return the document as YAML for `docker`, which reads `$` as a variable unless it is doubled."""
    head = f"# Written by swarmtrain. Run it with: {stack.command.format(file='THIS_FILE', name=stack.name)}\n"
    return head + "".join(_pieces(stack.document))


def _pieces(document: dict[str, Any]) -> Iterator[str]:
    """Yield the document's YAML, each service by itself: a dumper keeps what it has seen, and is the slower the more that is."""
    for key, value in document.items():
        if key != "services":
            yield _dumped({key: value})
            continue
        yield f"{key}:\n"
        for name, service in value.items():
            yield _dumped({key: {name: service}}).removeprefix(f"{key}:\n")


def _dumped(part: dict[str, Any]) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(_doubled(part), Dumper=dumper, sort_keys=False, width=140, allow_unicode=True))


def write(stack: Stack, path: Path) -> None:
    """Write the YAML to `path` and its files beside it; files of an earlier `write` that nothing refers to any more are removed.

    Raises StackError if that is not possible; then nothing has changed.
    """
    secret = _secret_files(stack)
    folder = path.parent / _folder(stack)
    try:
        files = {path.parent / name: (content, SECRET if name in secret else OPEN) for name, content in stack.files.items()}
        write_all({**files, path: (to_yaml(stack).encode(), OPEN)})
        # Last, so that whenever this is interrupted the file that is there refers to files that are there.
        for old in folder.iterdir():
            if _WRITTEN_BY_US.fullmatch(old.name) and f"{_folder(stack)}/{old.name}" not in stack.files:
                old.unlink()
    except OSError as error:
        raise StackError(
            f"the stack file cannot be written: {reason(error)}", place=str(path), hint="--output FILE writes it elsewhere"
        ) from None


class _Cargo:
    """The configs and secrets of a stack: key in the document → file, and each file's content."""

    def __init__(self, plan: Plan) -> None:
        self.files: dict[str, bytes] = {}
        self.configs: dict[str, str] = {}
        self.secrets: dict[str, str] = {}
        self.mounted: list[dict[str, Any]] = []
        self.mounted_secrets: list[dict[str, Any]] = []
        resolved = CodeFile.of("config.json", plan.config.resolved().to_json().encode())
        self.config_digest = resolved.digest
        self._longest_stem = _LONGEST_NAME - len(f"{plan.run}_-{resolved.digest}")
        self._add(resolved, CONFIG_PATH, self.configs, self.mounted, "config, with all defaults")
        for item in plan.cargo.code:
            self._add(item, str(WORKSPACE / item.name), self.configs, self.mounted, f"file {item.name}")
        for item in plan.cargo.secrets:
            self._add(item, item.name, self.secrets, self.mounted_secrets, f"config runner.secrets.{item.name}")

    def _add(self, item: CodeFile, target: str, keys: dict[str, str], mounts: list[dict[str, Any]], place: str) -> None:
        limit = _MAX_SECRET if keys is self.secrets else _MAX_CONFIG
        # The content of a secret that is on the swarm already is not known here.
        if not item.content and keys is self.configs:
            raise StackError("is empty, and Swarm takes no empty file", place=place, hint="put a comment into it")
        if len(item.content) >= limit:
            raise StackError(
                f"{len(item.content) / 1024:.0f} KiB, where Swarm takes less than {limit // 1024} KiB",
                place=place,
                hint="put what is large into the image, or onto a disk that docker_mounts names",
            )
        stem, dot, suffix = item.name.partition(".")
        key = f"{_object_name(stem)[: self._longest_stem]}-{item.digest}"
        path = f"generated/{key}{dot}{suffix}"
        self.files[path] = item.content
        keys[key] = path
        mounts.append({"source": key, "target": target})


def _object_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", stem)[:40] or "file"


def _node_service(plan: Plan, node: PlannedNode, cargo: _Cargo) -> dict[str, Any]:
    runner = plan.config.runner
    constraints = [node.constraint, *(f"node.labels.{key}=={value}" for key, value in sorted(runner.swarm.labels.items()))]
    environment = node_env(plan, node, _place(plan))
    environment.setdefault("NVIDIA_VISIBLE_DEVICES", _shown(plan, node))
    if runner.swarm.rdma:
        environment.setdefault("NVIDIA_MOFED", "enabled")
    service = _service(plan, plan.role, environment)
    if runner.docker_config.user:
        service["user"] = runner.docker_config.user
    service["configs"] = cargo.mounted
    if cargo.mounted_secrets:
        service["secrets"] = cargo.mounted_secrets
    service["volumes"] = mounts(runner.docker_config)
    if runner.swarm.rdma:
        # Adapters read and write memory that must not move; the runtime adds their devices.
        service["ulimits"] = {"memlock": -1}
        service["cap_add"] = ["IPC_LOCK"]
    service["deploy"] = _deploy(plan, cargo, ROLE_NODE, constraints, {LABEL_HOST: node.host, LABEL_SLOTS: str(node.slots)})
    resources = _resources(plan, node)
    if resources:
        service["deploy"]["resources"] = resources
    return service


def _rendezvous_service(plan: Plan, cargo: _Cargo) -> dict[str, Any]:
    service = _service(plan, "rendezvous", board_env(plan, _place(plan)))
    service["deploy"] = _deploy(plan, cargo, ROLE_RENDEZVOUS, _board_constraints(plan), {LABEL_HOSTS: json.dumps(plan.config.runner.hosts)})
    return service


def _home(docker: DockerConfig) -> dict[str, str]:
    """Return a HOME that can be written to by a user whom the image does not know: else it would be /."""
    return {"HOME": docker.cache_dir or "/tmp"} if docker.user else {}  # in the container, which is its own


def _board_constraints(plan: Plan) -> list[str]:
    if plan.board is None:
        return ["node.role==manager"]
    if plan.board.id:
        return ["node.role==manager", f"node.id=={plan.board.id}"]
    key = "node.ip" if _ADDRESS.fullmatch(plan.board.host) else "node.hostname"
    return ["node.role==manager", f"{key}=={plan.board.host}"]


def _place(plan: Plan) -> Place:
    port, docker = plan.master_port, plan.config.runner.docker_config
    address = plan.board.address if plan.board else ""
    return Place(
        board_host=address or RENDEZVOUS,
        # The store has no authentication: in a network of the run's own nobody else can reach it, elsewhere it takes as few
        # as it can. A name may mean the machine's loopback to itself.
        bind=address if _ADDRESS.fullmatch(address) else "0.0.0.0",
        config=CONFIG_PATH,
        code_dir=WORKSPACE,
        secrets_dir=PurePosixPath("/run/secrets"),
        log_dir="/tmp/swarmtrain",
        store_port=port,
        board_port=port + 1,
        mounts=tuple(target for _, target in docker.docker_mounts),
        environment={**docker.caches, **_home(docker)},
    )


def _service(plan: Plan, role: str, environment: dict[str, str]) -> dict[str, Any]:
    return {
        "image": plan.config.runner.docker_config.docker_container,
        "entrypoint": ["python3", "-m", MODULE],
        "command": [role],
        "init": True,
        "environment": {name: untemplated(value) for name, value in environment.items()},
        "networks": [NETWORK],
        "stop_grace_period": f"{plan.config.runner.stop_grace:g}s",
        "logging": {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}},
    }


def _deploy(plan: Plan, cargo: _Cargo, role: str, constraints: list[str], labels: dict[str, str]) -> dict[str, Any]:
    return {
        "mode": "replicated",
        "replicas": 1,
        # A virtual IP drops idle connections after 900 s.
        "endpoint_mode": "dnsrr",
        "labels": {LABEL_RUN: plan.run, LABEL_ROLE: role, LABEL_CONFIG: cargo.config_digest, **labels},
        "placement": {"constraints": constraints},
        # Exit 0 is final; whatever else happens, the node comes back. The budget is kept by the notice board.
        "restart_policy": {"condition": "on-failure", "delay": _DELAY_ON_HOST if plan.board else _DELAY},
        "update_config": {"parallelism": 1, "order": "stop-first", "failure_action": "continue"},
    }


def _shown(plan: Plan, node: PlannedNode) -> str:
    """Return what the nvidia runtime is to show in the container, in its own words."""
    if plan.config.runner.swarm.gpu is GpuMode.none:
        # Else an image that sets this to `all` shows every GPU of the node to a job that did not ask for one.
        return "void"
    # A toolkit that knows of Swarm's assignments prefers them to `all`; where it does not, the supervisor sees to it.
    return ",".join(node.gpus) or "all"


def _resources(plan: Plan, node: PlannedNode) -> dict[str, Any]:
    docker, swarm = plan.config.runner.docker_config, plan.config.runner.swarm
    resources: dict[str, Any] = {}
    limits = {}
    if docker.cpus is not None:
        limits["cpus"] = f"{docker.cpus:g}"
    if docker.memory is not None:
        limits["memory"] = str(docker.memory)
    if limits:
        resources["limits"] = limits
    if swarm.gpu is GpuMode.reserve:
        resources["reservations"] = {
            "generic_resources": [{"discrete_resource_spec": {"kind": swarm.generic_resource, "value": node.slots}}]
        }
    return resources


def _network(plan: Plan) -> dict[str, Any]:
    swarm = plan.config.runner.swarm
    if swarm.network:
        return {"external": True, "name": swarm.network}
    # The store has no authentication: nobody else may join.
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
    if plan.max_nodes > _NODES_IN_24:
        network["ipam"] = {"config": [{"subnet": _WIDE_SUBNET}]}
    return network


def _doubled(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_doubled(item) for item in value]
    return value


def _folder(stack: Stack) -> str:
    return next(iter(stack.files)).partition("/")[0]


def _secret_files(stack: Stack) -> set[str]:
    return {secret["file"] for secret in stack.document.get("secrets", {}).values()}
