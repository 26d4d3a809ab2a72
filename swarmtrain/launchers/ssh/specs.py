"""A plan as what each host is to keep going: values in, values out. In a container or not is a function on argv."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from swarmtrain.config.runner import DockerConfig, RunnerType
from swarmtrain.host.spec import Spec
from swarmtrain.launchers.ssh.record import Record
from swarmtrain.plan import Plan, PlannedNode
from swarmtrain.render.command import MODULE, Place, board_env, node_env
from swarmtrain.wire import CONFIG_PATH, RENDEZVOUS

_WORKSPACE = PurePosixPath("/workspace")
_SECRETS = PurePosixPath("/run/secrets")
_LOGS = "/tmp/swarmtrain"  # noqa: S108  # in the container
# Adapters for RDMA read and write memory that must not move. Not every engine may allow that: a rootless one may not.
_RDMA = ["--ulimit", "memlock=-1", "--cap-add", "IPC_LOCK"]


@dataclass(frozen=True)
class There:
    """What a spec must know of its host."""

    folder: PurePosixPath
    """The run's."""
    cwd: str
    gpus: int
    user: str
    """User and group, by number, of whom SSH lets in there."""


@dataclass(frozen=True)
class Around:
    """What is started, and what is run before it, to end it and after it: as Spec has them."""

    argv: list[str]
    prepare: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    clean: list[str] = field(default_factory=list)


def specs(plan: Plan, record: Record, hosts: Mapping[str, There]) -> dict[str, list[Spec]]:
    """Return what each host is to keep going, by host, the board first."""
    docker = plan.config.runner.runner_type is RunnerType.pdsh_docker
    content = "-".join([plan.config.resolved().digest, *(item.digest for item in (*plan.cargo.code, *plan.cargo.secrets))])
    found: dict[str, list[Spec]] = {node.host: [] for node in plan.nodes}
    for name, node in [(RENDEZVOUS, None), *((node.name, node) for node in plan.nodes)]:
        host = node.host if node else record.board
        there = hosts[host]
        place = _place(plan, record, there, docker=docker)
        env = node_env(plan, node, place) | _gpus(node, docker=docker) if node else board_env(plan, place)
        argv = ["python3" if docker else record.pythons[host], "-u", "-m", MODULE, "node" if node else "rendezvous"]
        around = in_docker(plan, node, there, argv, env) if docker else Around(argv)
        log = str(there.folder / f"{name}.log")
        out = log if node else str(there.folder / "events.jsonl")
        found[host].append(Spec(name, env=env, cwd=there.cwd, stdout=out, stderr=log, content=content if node else "", **asdict(around)))
    return found


def _gpus(node: PlannedNode, *, docker: bool) -> dict[str, str]:
    """Which GPUs a node may use, where hosts says so; a container is given no others."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(node.gpus)} if node.gpus and not docker else {}


def _place(plan: Plan, record: Record, there: There, *, docker: bool) -> Place:
    return Place(
        board_host=record.address,
        bind="0.0.0.0",  # noqa: S104  # the machines' own network: whatever name or address the others were told
        config=CONFIG_PATH if docker else str(there.folder / "config.json"),
        code_dir=_WORKSPACE if docker else there.folder / "code",
        secrets_dir=_SECRETS if docker else there.folder / "secrets",
        log_dir=_LOGS if docker else str(there.folder / "logs"),
        store_port=record.store_port,
        board_port=record.board_port,
        mounts=tuple(target for _, target in plan.config.runner.docker_config.docker_mounts) if docker else (),
        environment=_in_image(plan.config.runner.docker_config) if docker else {},
    )


def _in_image(docker: DockerConfig) -> dict[str, str]:
    """The user is one whom the image need not know, and whose HOME would be / then."""
    return {**docker.caches, "HOME": docker.cache_dir or "/tmp"}  # noqa: S108  # in the container


def _mount(docker: DockerConfig, source: str, target: str) -> list[str]:
    """Return the option that mounts a path or a volume; one with options of its own is made by them."""
    if source not in docker.volumes:
        return ["--volume", f"{source}:{target}"]
    line = io.StringIO()
    wanted = [f"volume-opt={key}={value}" for key, value in docker.volumes[source].items()]
    csv.writer(line, lineterminator="").writerow(["type=volume", f"source={source}", f"target={target}", *wanted])
    return ["--mount", line.getvalue()]


def in_docker(plan: Plan, node: PlannedNode | None, there: There, argv: list[str], env: dict[str, str]) -> Around:
    """Return what keeps a container in which `argv` runs with `env`.

    Of the variables only the names are written there: docker takes the values from its own environment. A `docker run` that
    is ended while it waits for the engine leaves a container that nobody knows of, so it is made and started apart. SIGTERM
    is for the container: docker 28 ends at it, with 0, where it has only started one.
    """
    docker, cargo = plan.config.runner.docker_config, plan.cargo
    sudo = sudo_docker(plan, preserve=",".join(env))
    container = f"{plan.run}-{node.name if node else RENDEZVOUS}"
    files = [("config.json", CONFIG_PATH), *((f"code/{item.name}", str(_WORKSPACE / item.name)) for item in cargo.code)]
    files += [(f"secrets/{item.name}", str(_SECRETS / item.name)) for item in cargo.secrets]
    ours = [f"{there.folder / source}:{target}:ro" for source, target in files] if node else []
    options: dict[str, Any] = {
        "--name": container,
        "--network": "host",
        "--ipc": "host",
        "--user": docker.user or there.user,
        "--gpus": _docker_gpus(node, there),
        "--cpus": docker.cpus if node else None,
        "--memory": docker.memory if node else None,
    }
    words = [word for option, value in options.items() if value for word in (option, str(value))]
    words += [word for source, target in docker.docker_mounts if node for word in _mount(docker, source, target)]
    words += [word for mount in ours for word in ("--volume", mount)]
    words += [word for variable in env for word in ("--env", variable)]
    words += ["--privileged"] if docker.privileged else []
    words += _RDMA if node and plan.config.runner.swarm.rdma else []
    words += ["--label", f"swarmtrain.run={plan.run}"]
    program, *arguments = argv
    return Around(
        argv=[*sudo_docker(plan), "start", "--attach", container],
        prepare=[*sudo, "create", "--rm", *words, "--entrypoint", program, docker.docker_container, *arguments],
        end=[*sudo_docker(plan), "kill", "--signal", "TERM", container],
        clean=[*sudo_docker(plan), "rm", "--force", container],
    )


def sudo_docker(plan: Plan, preserve: str = "") -> list[str]:
    """Return how `docker` is called on a host; sudo keeps the variables `preserve`, and asks for no password."""
    if not plan.config.runner.docker_config.docker_sudo:
        return ["docker"]
    return ["sudo", "-n", *([f"--preserve-env={preserve}"] if preserve else []), "docker"]


def _docker_gpus(node: PlannedNode | None, there: There) -> str:
    if node is None or not (node.gpus or there.gpus):
        return ""
    return f'"device={",".join(node.gpus)}"' if node.gpus else "all"
