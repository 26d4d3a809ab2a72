"""Convert a plan to the specs of the processes on each host. Pure functions; with containers, only the command lines differ."""

from __future__ import annotations

import csv
import io
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from swarmtrain.cargo import Cargo
from swarmtrain.config.schema.runner import DockerConfig
from swarmtrain.launchers.common.docker_engine import build_exec_argv
from swarmtrain.launchers.ssh.run_index import RunRecord
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import CONFIG_PATH, RENDEZVOUS_SERVICE, RUN_KEY_NAME
from swarmtrain.remote.process_spec import ProcessSpec
from swarmtrain.remote.run_folder import EVENTS_FILE
from swarmtrain.render.process_environment import ENTRYPOINT_MODULE, HIDDEN_GPUS_ENV, NodeLayout, build_coordinator_env, build_node_env

_WORKSPACE_FOLDER = PurePosixPath("/workspace")
_SECRETS_FOLDER = PurePosixPath("/run/secrets")
_MAX_CODE_FILE_MOUNTS = 100
_LOGS_FOLDER = "/tmp/swarmtrain"  # noqa: S108  # in the container
# RDMA requires locked memory. A rootless engine may be unable to grant these options.
_RDMA_OPTIONS = ["--ulimit", "memlock=-1", "--cap-add", "IPC_LOCK"]


_EXEC_PROGRAM = """
import json, os, sys
spec = json.load(open(sys.argv[1]))
os.chdir(spec["cwd"])
try:
    os.execvpe(sys.argv[2], sys.argv[2:], {**os.environ, **spec["env"]})
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


@dataclass(frozen=True)
class HostContext:
    """Properties of a host that its process specs depend on."""

    folder: PurePosixPath
    """The run's folder."""
    records_folder: PurePosixPath
    """The folder of the run's events and logs."""
    cwd: str
    gpus: int
    user: str
    """User id and group id of the SSH user on the host."""
    default_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables by node name, which the config's variables override."""


@dataclass(frozen=True)
class ProcessCommands:
    """Commands of a process: to start it, to prepare it, to stop it, and to clean up after it, as in ProcessSpec."""

    argv: list[str]
    prepare_command: list[str] = field(default_factory=list)
    stop_command: list[str] = field(default_factory=list)
    cleanup_command: list[str] = field(default_factory=list)


def build_process_specs(plan: Plan, record: RunRecord, host_contexts: Mapping[str, HostContext]) -> dict[str, list[ProcessSpec]]:
    """Return the specs of the processes of each host, by host, the coordinator first."""
    uses_docker = plan.config.runner.capabilities.runs_in_containers
    content_digest = f"{plan.config.to_node_config().digest}-{plan.cargo.digest}"
    specs_by_host: dict[str, list[ProcessSpec]] = {record.nodes[node.name]: [] for node in plan.nodes}
    for name, node in [(RENDEZVOUS_SERVICE, None), *((node.name, node) for node in plan.nodes)]:
        host = record.hosts_by_process[name]
        host_context = host_contexts[host]
        layout = _build_node_layout(plan, record, host_context, uses_docker=uses_docker)
        env = (
            {
                **host_context.default_env.get(name, {}),
                **build_node_env(plan, node, layout),
                **_build_gpu_env(node, uses_docker=uses_docker),
            }
            if node
            else build_coordinator_env(plan, layout, record.identity.id) | (HIDDEN_GPUS_ENV if uses_docker else {})
        )
        argv = ["python3" if uses_docker else record.interpreters[host], "-u", "-m", ENTRYPOINT_MODULE, "node" if node else "rendezvous"]
        commands = wrap_command_in_container(plan, node, host_context, argv, env) if uses_docker else ProcessCommands(argv)
        log = str(host_context.records_folder / f"{name}.log")
        stdout = log if node else str(host_context.records_folder / EVENTS_FILE)
        specs_by_host[host].append(
            ProcessSpec(
                name,
                env=env,
                cwd=host_context.cwd,
                stdout=stdout,
                stderr=log,
                content_digest=content_digest if node else plan.cargo.channel_digest,
                **asdict(commands),
            )
        )
    return specs_by_host


def _build_gpu_env(node: PlannedNode, *, uses_docker: bool) -> dict[str, str]:
    """Return the environment variables that restrict a node to its GPUs in the config's `hosts`: CUDA_VISIBLE_DEVICES.

    Empty for a container, which is restricted by docker's option --gpus instead.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(node.gpus)} if node.gpus and not uses_docker else {}


def _build_node_layout(plan: Plan, record: RunRecord, host_context: HostContext, *, uses_docker: bool) -> NodeLayout:
    return NodeLayout(
        coordinator_host=record.address,
        # The coordinator falls back to all addresses if the host does not have this one, for example behind NAT.
        bind_address=record.address if _is_ipv4_address(record.address) else "0.0.0.0",  # noqa: S104
        config_path=CONFIG_PATH if uses_docker else str(host_context.folder / "config.json"),
        code_folder=_WORKSPACE_FOLDER if uses_docker else host_context.folder / "code",
        secrets_dir=_SECRETS_FOLDER if uses_docker else host_context.folder / "secrets",
        key_file=str((_SECRETS_FOLDER if uses_docker else host_context.folder / "secrets") / RUN_KEY_NAME),
        log_dir=_LOGS_FOLDER if uses_docker else str(host_context.folder / "logs"),
        coordinator_port=record.coordinator_port,
        mounts=tuple(target for _, target in plan.config.runner.docker_config.docker_mounts) if uses_docker else (),
        environment=_build_container_env(plan.config.runner.docker_config) if uses_docker else {},
    )


def _is_ipv4_address(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 4
    except ValueError:
        return False


def _build_container_env(docker_config: DockerConfig) -> dict[str, str]:
    """Return the container's environment variables, including HOME, which would be / for a user that the image's /etc/passwd lacks."""
    return {**docker_config.cache_variables, "HOME": docker_config.cache_dir or "/tmp"}  # noqa: S108  # in the container


def _format_mount_option(docker_config: DockerConfig, source: str, target: str) -> list[str]:
    """Return the docker option that mounts `source`, a path or a volume, at `target`. Docker creates a missing volume with its options."""
    if source not in docker_config.volumes:
        return ["--volume", f"{source}:{target}"]
    line = io.StringIO()
    volume_options = [f"volume-opt={key}={value}" for key, value in docker_config.volumes[source].items()]
    csv.writer(line, lineterminator="").writerow(["type=volume", f"source={source}", f"target={target}", *volume_options])
    return ["--mount", line.getvalue()]


def _list_run_file_mounts(cargo: Cargo, run_folder: PurePosixPath) -> list[str]:
    """Return the mounts of the run's files, as SOURCE:TARGET:ro. Many code files are one mount, which hides the image's own workspace."""
    files = [("config.json", CONFIG_PATH), *((f"secrets/{item.name}", str(_SECRETS_FOLDER / item.name)) for item in cargo.node_secrets)]
    is_one_mount = len(cargo.code) > _MAX_CODE_FILE_MOUNTS
    if not is_one_mount:
        files += [(f"code/{item.name}", str(_WORKSPACE_FOLDER / item.name)) for item in cargo.code]
    mounts = [f"{run_folder / source}:{target}:ro" for source, target in files]
    # Writable, like the workspace of an image: the script may write to its working folder, and docker creates mount points there.
    return [*mounts, f"{run_folder / 'code'}:{_WORKSPACE_FOLDER}"] if is_one_mount else mounts


def _mount_secret(name: str, run_folder: PurePosixPath) -> str:
    return f"{run_folder / 'secrets' / name}:{_SECRETS_FOLDER / name}:ro"


def wrap_command_in_container(
    plan: Plan, node: PlannedNode | None, host_context: HostContext, argv: list[str], env: dict[str, str]
) -> ProcessCommands:
    """Return the commands that run `argv` with the environment variables `env` in a container.

    The commands contain only the names of the variables: docker takes the values from its own environment. The container is created and
    started by separate commands, because a `docker run` that is killed while it waits for the engine leaves an unknown container behind.
    SIGTERM is sent to the container, not to the `docker start` process: the `docker start` of docker 28 exits with code 0 on SIGTERM.
    """
    docker = plan.config.runner.docker_config
    docker_argv = build_docker_argv(plan, preserved_variables=",".join(env))
    container_name = f"{plan.run}-{node.name if node else RENDEZVOUS_SERVICE}"
    own_mounts = [
        _mount_secret(RUN_KEY_NAME, host_context.folder),
        *(_list_run_file_mounts(plan.cargo, host_context.folder) if node else ()),
        *(_mount_secret(item.name, host_context.folder) for item in (() if node else plan.cargo.channel_secrets)),
    ]
    options: dict[str, Any] = {
        "--name": container_name,
        "--network": "host",
        "--ipc": "host",
        "--user": docker.user or host_context.user,
        "--gpus": _format_gpus_option(node, host_context),
        "--cpus": docker.cpus if node else None,
        "--memory": docker.memory if node else None,
    }
    option_words = [word for option, value in options.items() if value for word in (option, str(value))]
    option_words += [word for source, target in docker.docker_mounts if node for word in _format_mount_option(docker, source, target)]
    option_words += [word for mount in own_mounts for word in ("--volume", mount)]
    option_words += [word for variable in env for word in ("--env", variable)]
    option_words += ["--privileged"] if docker.privileged else []
    option_words += _RDMA_OPTIONS if node and plan.config.runner.swarm.rdma else []
    option_words += ["--label", f"swarmtrain.run={plan.run}"]
    program, *arguments = argv
    return ProcessCommands(
        argv=[*build_docker_argv(plan), "start", "--attach", container_name],
        prepare_command=[*docker_argv, "create", "--rm", *option_words, "--entrypoint", program, docker.docker_container, *arguments],
        stop_command=[*build_docker_argv(plan), "kill", "--signal", "TERM", container_name],
        cleanup_command=[*build_docker_argv(plan), "rm", "--force", container_name],
    )


def build_container_exec_argv(spec: ProcessSpec, argv: Sequence[str], *, with_terminal: bool) -> list[str]:
    """Return the command that runs `argv` in the container of the process `spec`, on its host."""
    *docker_argv, _, _, container_name = spec.cleanup_command
    return build_exec_argv(docker_argv, container_name, argv, with_terminal=with_terminal)


def build_host_exec_argv(spec: ProcessSpec, spec_file: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` with the environment and the working folder of the process `spec`, on its host.

    The variables are read from the file of the spec on the host: they must not become part of a command line.
    """
    return [spec.argv[0], "-c", _EXEC_PROGRAM, spec_file, *argv]


def build_docker_argv(plan: Plan, preserved_variables: str = "") -> list[str]:
    """Return the docker command prefix on a host: `docker`, with sudo if the config requires it.

    sudo must be passwordless, and preserves the environment variables in `preserved_variables`.
    """
    if not plan.config.runner.docker_config.docker_sudo:
        return ["docker"]
    return ["sudo", "-n", *([f"--preserve-env={preserved_variables}"] if preserved_variables else []), "docker"]


def _format_gpus_option(node: PlannedNode | None, host_context: HostContext) -> str:
    if node is None or not (node.gpus or host_context.gpus):
        return ""
    return f'"device={",".join(node.gpus)}"' if node.gpus else "all"
