"""The commands of a run and their environments, as values: the same on every launcher but for where things lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from swarmtrain.plan import Plan, PlannedNode
from swarmtrain.wire import BoardEnv, NodeEnv, ProbeEnv

MODULE = "swarmtrain.entrypoint"


@dataclass(frozen=True)
class Place:
    """Where a launcher puts things, in the eyes of the node."""

    board_host: str
    bind: str
    config: str
    code_dir: PurePath
    secrets_dir: PurePath
    log_dir: str
    store_port: int
    board_port: int
    mounts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """What programs are to know there, unless the user says otherwise."""


def node_env(plan: Plan, node: PlannedNode, place: Place) -> dict[str, str]:
    """Return the environment of `node`'s supervisor: NodeEnv, NCCL's settings, the user's variables, a NAME_FILE for each secret."""
    runner = plan.config.runner
    secrets = {secret.name: str(place.secrets_dir / secret.name) for secret in plan.cargo.secrets}
    ours = NodeEnv(
        run=plan.run,
        node=node.name,
        slots=node.slots,
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        board=f"{place.board_host}:{place.board_port}",
        store=f"{place.board_host}:{place.store_port}",
        config=place.config,
        script=str(place.code_dir / runner.script.name),
        script_args=runner.script_args,
        secrets=secrets,
        stop_grace=runner.stop_grace,
        log_dir=place.log_dir,
        mounts=place.mounts,
        interface=node.talks_by or runner.interface or "",
        numa=runner.numa or "",
    )
    probe = _probe_env(plan, place).to_env() if plan.probe else {}
    files = {f"{name}_FILE": path for name, path in secrets.items()}
    return {**_recorder(plan, place), **runner.nccl.environment, **place.environment, **runner.env, **files, **ours.to_env(), **probe}


def _recorder(plan: Plan, place: Place) -> dict[str, str]:
    """Return what makes NCCL's flight recorder keep each rank's last collectives, and write them where logs are if one hangs.

    A variable that the user has set under its older name is left out, since torch would prefer ours.
    """
    config = plan.config
    folder = config.logger.log_dir or config.trainer.save_dir or PurePath(place.log_dir)
    wanted = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): f"{folder}/nccl-rank-",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    return {names[0]: value for names, value in wanted.items() if not any(name in config.runner.env for name in names)}


def _probe_env(plan: Plan, place: Place) -> ProbeEnv:
    own = {node.name: node.address or node.host for node in plan.nodes} if plan.config.runner.swarm.on_host_network else {}
    return ProbeEnv(tuple(node.name for node in plan.nodes), own, place.board_port + 1)


def board_env(plan: Plan, place: Place) -> dict[str, str]:
    """Return the environment of the rendezvous role."""
    return BoardEnv(
        run=plan.run,
        board_port=place.board_port,
        store_port=place.store_port,
        bind=place.bind,
        max_restarts=plan.config.runner.max_restarts,
        max_restarts_per_hour=plan.config.runner.restarts_per_hour,
        min_nodes=plan.min_nodes,
    ).to_env()
