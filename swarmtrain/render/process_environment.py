"""Commands of a run and their environment variables. They are the same for every launcher, except for paths and addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.notifications.channel import ChannelSettings, encode_channels, name_channel_secret
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import ENV_GPUS, ENV_NOTIFY, CoordinatorEnv, NodeEnv, ProbeEnv

ENTRYPOINT_MODULE = "swarmtrain.entrypoint"
VISIBLE_DEVICES_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
HIDDEN_GPUS_ENV = {VISIBLE_DEVICES_VARIABLE: "void"}
"""Environment of a container that uses no GPUs. Without it, an image that sets the variable to `all` shows every GPU to the container, and
NVIDIA's container runtime refuses to start the container on a machine without a GPU driver."""


@dataclass(frozen=True)
class NodeLayout:
    """Layout of a node: the paths and addresses that a launcher chooses, as seen from the node."""

    coordinator_host: str
    bind_address: str
    config_path: str
    code_folder: PurePath
    secrets_dir: PurePath
    log_dir: str
    coordinator_port: int
    key_file: str = ""
    """Path of the run's key, if it has one."""
    mounts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Default environment variables of the node's processes, which the user may override."""


def build_node_env(plan: Plan, node: PlannedNode, layout: NodeLayout) -> dict[str, str]:
    """Return the environment of the supervisor of `node`: NodeEnv, NCCL's settings, the user's variables, and NAME_FILE for each secret."""
    runner = plan.config.runner
    secrets = {secret.name: str(layout.secrets_dir / secret.name) for secret in plan.cargo.node_secrets}
    node_variables = NodeEnv(
        run=plan.run,
        node=node.name,
        slots=node.slots,
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        coordinator=f"{layout.coordinator_host}:{layout.coordinator_port}",
        config=layout.config_path,
        code_folder=str(layout.code_folder),
        script="" if runner.module else str(layout.code_folder / runner.script_name),
        script_args=runner.script_args,
        secrets=secrets,
        stop_grace=runner.stop_grace,
        log_dir=layout.log_dir,
        mounts=layout.mounts,
        interface=node.rank_interface or runner.interface or "",
        numa=runner.numa or "",
        module=runner.module or "",
        key_file=layout.key_file,
    )
    probe_variables = _build_probe_env(plan, layout).to_env() if plan.is_probe else {}
    secret_file_variables = {f"{name}_FILE": path for name, path in secrets.items()}
    return {
        **_build_flight_recorder_env(plan, layout),
        **runner.nccl.environment,
        **layout.environment,
        **runner.env,
        **secret_file_variables,
        **node_variables.to_env(),
        **_build_gpu_count_env(plan, node),
        **probe_variables,
    }


def _build_gpu_count_env(plan: Plan, node: PlannedNode) -> dict[str, str]:
    """Return the variable with the number of GPUs that the plan assumes on `node`; empty for a run that uses none."""
    return {} if plan.gpu_mode is GpuMode.none else {ENV_GPUS: f"{node.slots}{'' if node.has_slot_per_gpu else '+'}"}


def _build_flight_recorder_env(plan: Plan, layout: NodeLayout) -> dict[str, str]:
    """Return the variables that make NCCL's flight recorder store the last collectives of each rank, and dump them to the logs on a hang.

    If the user has set a variable under its older name, the new name is not set, because torch prefers the new name.
    """
    config = plan.config
    folder = config.logger.log_dir or config.trainer.save_dir or PurePath(layout.log_dir)
    settings = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): f"{folder}/nccl-rank-",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    return {names[0]: value for names, value in settings.items() if not any(name in config.runner.env for name in names)}


def _build_probe_env(plan: Plan, layout: NodeLayout) -> ProbeEnv:
    addresses = {node.name: node.address or node.host for node in plan.nodes} if plan.config.runner.swarm.is_on_host_network else {}
    return ProbeEnv(tuple(node.name for node in plan.nodes), addresses, layout.coordinator_port + 1, plan.step_time_seconds)


def build_coordinator_env(plan: Plan, layout: NodeLayout, run_id: str = "") -> dict[str, str]:
    """Return the environment of the coordinator of the run with the id `run_id`, which may be unknown: CoordinatorEnv and the channels."""
    variables = CoordinatorEnv(
        run=plan.run,
        coordinator_port=layout.coordinator_port,
        bind=layout.bind_address,
        max_restarts=plan.config.runner.max_restarts,
        max_restarts_per_hour=plan.config.runner.effective_max_restarts_per_hour,
        min_nodes=plan.min_nodes,
        run_id=run_id,
        key_file=layout.key_file,
    ).to_env()
    channels = [
        ChannelSettings(name, channel.type, channel.events, str(layout.secrets_dir / name_channel_secret(name)))
        for name, channel in sorted(plan.config.notify.items())
    ]
    return {**variables, **({ENV_NOTIFY: encode_channels(channels)} if channels else {})}
