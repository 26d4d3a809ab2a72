"""`runner`: where the job runs, and what is started there. Holds what every launcher needs."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from swarmtrain.config import names
from swarmtrain.config.base import Section, twice, wrong
from swarmtrain.config.names import host_name

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_NODES = 10_000
_LARGEST = 1 << 62


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", value.lower())
    if match is None:
        raise ValueError("give a number of bytes, or a size such as 512m or 16g")
    size = float(match[1]) * _UNITS[match[2]]
    if size > _LARGEST:
        raise ValueError("is more than any machine has")
    return int(size)


def _pairs(value: Any) -> Any:
    """Read a flat list of even length as consecutive pairs, which is what Scaling's own guide shows."""
    if not isinstance(value, list):
        return value
    if value and all(isinstance(item, str) for item in value):
        if len(value) % 2:
            raise ValueError("a flat list must have an even length: source, target, source, target …")
        return tuple(zip(value[::2], value[1::2], strict=True))
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _texts(value: Any) -> Any:
    """Read numbers in a list as text: GPUs have numbers and UUIDs."""
    return tuple(str(item) if type(item) is int else item for item in value) if isinstance(value, list) else value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1, le=_LARGEST)]
Mounts = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs), AfterValidator(names.mounts)]
Image = Annotated[str, AfterValidator(names.image)]
Network = Annotated[str, AfterValidator(names.network)]
Labels = Annotated[dict[str, str], AfterValidator(names.labels)]
Host = Annotated[str, AfterValidator(names.host)]
GpuIds = Annotated[tuple[str, ...], BeforeValidator(_texts), AfterValidator(names.gpu_ids)]
Environment = Annotated[dict[str, str], AfterValidator(names.variables)]


class RunnerType(StrEnum):
    """The launchers."""

    swarm = "swarm"
    local = "local"


class GpuMode(StrEnum):
    """How containers come by their GPUs."""

    none = "none"
    visible = "visible"
    reserve = "reserve"


_SWARM_CHOOSES = {GpuMode.none: "", GpuMode.visible: "", GpuMode.reserve: ": Swarm gives out whichever are free"}


class DockerConfig(Section):
    """The container that each node runs."""

    docker_container: Image = Field("registry.lab:5000/swarmtrain:latest", description="Image, with its registry.")
    docker_mounts: Mounts = Field(
        (), description="Pairs of a path on every node (or the name of a volume) and a path in the container. A shared disk belongs here."
    )
    shm_size: Bytes = Field(2**30, description="Size of /dev/shm, in bytes or as 8g. Docker's own 64 MiB is too small for NCCL.")
    cpus: float | None = Field(None, ge=0.01, le=65536, description="CPUs a node's container may use. null: all.")
    memory: Bytes | None = Field(None, description="Memory a node's container may use, in bytes or as 64g. /dev/shm counts too. null: all.")


class SwarmConfig(Section):
    """What only a Docker Swarm has."""

    network: Network | None = Field(None, description="Overlay network to join. null: the stack makes its own.")
    mtu: int | None = Field(
        None, ge=576, le=65535, description="MTU of the network beneath the overlay, 9000 for jumbo frames. null: 1500."
    )
    encrypted: bool = Field(False, description="Encrypt traffic between nodes. Costs most of the throughput.")
    gpu: GpuMode = Field(
        GpuMode.none,
        description="none: CPU. visible: all GPUs of a host, or gpu_ids. reserve: as many as slots, and no other run gets them.",
    )
    gpu_ids: GpuIds = Field(
        (), description="GPUs that every host shows when gpu is visible, by number or UUID; a host's own: 'gpu-1 slots=0,2'. []: all."
    )
    generic_resource: str = Field("NVIDIA-GPU", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="Kind reserved when gpu is reserve.")
    labels: Labels = Field({}, description="Only nodes that carry all these labels are used.")

    @model_validator(mode="after")
    def _network_is_made_by_us(self) -> SwarmConfig:
        if self.network and (self.mtu or self.encrypted):
            raise wrong("network", "mtu and encrypted belong to the network that the stack makes; an existing one keeps its own")
        return self

    @model_validator(mode="after")
    def _gpus_are_chosen_once(self) -> SwarmConfig:
        if self.gpu_ids and self.gpu is not GpuMode.visible:
            raise wrong("gpu_ids", f"are shown when gpu is visible, and it is {self.gpu}{_SWARM_CHOOSES[self.gpu]}", "gpu: visible")
        return self


class RunnerConfig(Section):
    """Where the job runs, and what is started there."""

    runner_type: RunnerType = Field(RunnerType.swarm, description="swarm: a Docker Swarm. local: this machine, no Docker.")
    hosts: tuple[Host, ...] | None = Field(
        None,
        description="Host names or node ids, each with its slots if it likes: 'gpu-1 slots=4', or 'gpu-2 slots=0,2' for these GPUs. "
        "null: the cluster's own nodes.",
    )
    nodes: int | None = Field(None, ge=1, le=_MOST_NODES, description="Nodes to use. null: as many as hosts lists, else min_nodes, else 1.")
    min_nodes: int | None = Field(
        None, ge=1, le=_MOST_NODES, description="Fewest nodes the run goes on with. null: nodes, so a lost node is waited for."
    )
    max_nodes: int | None = Field(
        None, ge=1, le=_MOST_NODES, description="Most nodes it can be scaled to without restarting the others. null: nodes."
    )
    default_gpu_count: int | None = Field(
        None,
        ge=1,
        le=names.MOST_SLOTS,
        description="Slots (ranks) of a host that does not say. null: its GPUs as the cluster reports them, else 1.",
    )
    script: Path = Field(Path("training_code.py"), description="What torchrun starts on every slot.")
    script_args: tuple[str, ...] = Field((), description="Its arguments.")
    code: tuple[Path, ...] = Field((), description="Files that travel beside the script, so that editing them needs no new image.")
    env: Environment = Field({}, description="Environment of every rank, for instance NCCL_DEBUG: INFO.")
    secrets: Annotated[dict[str, Path], AfterValidator(names.secrets)] = Field(
        {}, description="Name to file. Ranks find the file's path in the variable NAME_FILE; the secret itself enters no variable."
    )
    master_port: int = Field(29500, ge=1, le=65534, description="Port of the rendezvous store; the notice board listens on the next one.")
    max_restarts: int = Field(
        3, ge=0, le=1_000_000, description="Failures in a row, without a new step between them, after which the run is given up."
    )
    stop_grace: float = Field(90.0, ge=5, le=86400, description="Seconds from SIGTERM to SIGKILL: the time a checkpoint may take.")
    docker_config: DockerConfig = Field(DockerConfig(), description="The container that each node runs.")
    swarm: SwarmConfig = Field(SwarmConfig(), description="What only a Docker Swarm has.")

    @model_validator(mode="after")
    def _slots_have_gpus(self) -> RunnerConfig:
        mode, shown = self.swarm.gpu, len(self.swarm.gpu_ids)
        for host in self.hosts or ():
            if names.host_gpus(host) and mode is not GpuMode.visible and self.runner_type is RunnerType.swarm:
                reason = f"{host!r} names GPUs, and swarm.gpu is {mode}{_SWARM_CHOOSES[mode]}"
                raise wrong("hosts", reason, f"swarm.gpu: visible, or '{host_name(host)} slots={names.host_slots(host)}'")
            if shown and not names.host_gpus(host) and (names.host_slots(host) or 0) > shown:
                raise wrong("hosts", f"{host!r} has more slots than the {shown} GPUs of swarm.gpu_ids")
        if shown and (self.default_gpu_count or 0) > shown:
            raise wrong("default_gpu_count", f"{self.default_gpu_count} slots, and swarm.gpu_ids names {shown} GPUs")
        return self

    @model_validator(mode="after")
    def _counts_fit(self) -> RunnerConfig:
        if self.hosts is not None:
            hosts = [host_name(host) for host in self.hosts]
            if not hosts:
                raise wrong("hosts", "is empty: list at least one, or write null for the cluster's own nodes")
            if again := twice(hosts):
                raise wrong(
                    "hosts",
                    f"names {again} more than once: one service runs on each node",
                    "several ranks on one host are its slots: 'gpu-1 slots=2'",
                )
            if self.nodes is not None and self.nodes > len(hosts):
                raise wrong(
                    "nodes", f"{self.nodes}, but hosts lists only {len(hosts)}", "list more hosts, or leave nodes out to use those listed"
                )
        low, nodes, high = self.node_range
        if not low <= nodes <= high:
            raise wrong(
                "min_nodes" if low > nodes else "max_nodes", f"min_nodes <= nodes <= max_nodes does not hold: {low} <= {nodes} <= {high}"
            )
        return self

    @property
    def node_range(self) -> tuple[int, int, int]:
        """min_nodes, nodes and max_nodes with their defaults filled in."""
        nodes = self.nodes or (len(self.hosts) if self.hosts else self.min_nodes or 1)
        return self.min_nodes or nodes, nodes, self.max_nodes or nodes
