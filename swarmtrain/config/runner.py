"""`runner`: where the job runs, and what is started there. Holds what every launcher needs."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from swarmtrain.config import names
from swarmtrain.config.base import Section, twice, wrong
from swarmtrain.config.names import HOST_NETWORK, host_name
from swarmtrain.config.slurm import SlurmConfig

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_NODES = 10_000
_RESTARTS_PER_HOUR = 20
_LARGEST = 1 << 62
_MOST_SOCKETS = 64


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
Volumes = Annotated[dict[str, dict[str, str]], AfterValidator(names.volumes)]
ContainerPath = Annotated[str, AfterValidator(names.container_path)]
User = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value), AfterValidator(names.user)]
Image = Annotated[str, AfterValidator(names.image)]
Network = Annotated[str, AfterValidator(names.network)]
Interface = Annotated[str, AfterValidator(names.interface)]
Labels = Annotated[dict[str, str], AfterValidator(names.labels)]
Host = Annotated[str, AfterValidator(names.host)]
Hosts = Annotated[tuple[Host, ...], BeforeValidator(names.written_out)]
GpuIds = Annotated[tuple[str, ...], BeforeValidator(_texts), AfterValidator(names.gpu_ids)]
Environment = Annotated[dict[str, str], AfterValidator(names.variables)]


class RunnerType(StrEnum):
    """The launchers."""

    swarm = "swarm"
    docker = "docker"
    local = "local"
    pdsh = "pdsh"
    pdsh_docker = "pdsh_docker"
    slurm = "slurm"


OVER_SSH = (RunnerType.pdsh, RunnerType.pdsh_docker)


class GpuMode(StrEnum):
    """How containers come by their GPUs."""

    none = "none"
    visible = "visible"
    reserve = "reserve"


class NcclDebug(StrEnum):
    """How much NCCL tells."""

    version = "VERSION"
    warn = "WARN"
    info = "INFO"
    trace = "TRACE"


class NumaBinding(StrEnum):
    """Which cores a rank may use, by the GPU that it has."""

    node = "node"
    socket = "socket"
    exclusive = "exclusive"
    core_complex = "core-complex"


_SWARM_CHOOSES = {GpuMode.none: "", GpuMode.visible: "", GpuMode.reserve: ": Swarm gives out whichever are free"}


class DockerConfig(Section):
    """The container that each node runs."""

    docker_container: Image = Field("registry.lab:5000/swarmtrain:latest", description="Image, with its registry.")
    docker_mounts: Mounts = Field(
        (), description="Pairs of a path on every node (or the name of a volume) and a path in the container. A shared disk belongs here."
    )
    volumes: Volumes = Field(
        {},
        description="Name of a volume in docker_mounts to the options of Docker's local driver, for NFS {type: nfs, o: 'addr=nas,rw', "
        "device: ':/export'}. Other options make another volume. One that is not named here is an empty folder of each node's own.",
    )
    cache_dir: ContainerPath | None = Field(
        None,
        description="Folder in the container for what is downloaded or compiled (Hugging Face, inductor, Triton, wandb). To outlive "
        "containers it is in a mount, as with docker_mounts: [[cache, /cache]]. null: HOME.",
    )
    user: User | None = Field(
        None,
        description="User and group of the ranks, as 1000 or 1000:1000: whoever may write to save_dir. null: who owns its folder, if that "
        "is in a mount and the machine that deploys sees it there, and it is not root's; else the image's. A run that is up keeps its own.",
    )
    shm_size: Bytes = Field(2**30, description="Size of /dev/shm, in bytes or as 8g. Docker's own 64 MiB is too small for NCCL.")
    docker_sudo: bool = Field(False, description="With pdsh_docker: sudo before docker, which must ask for no password.")
    privileged: bool = Field(False, description="With pdsh_docker: docker run --privileged. Devices and /dev/shm work without.")
    cpus: float | None = Field(None, ge=0.01, le=65536, description="CPUs a node's container may use. null: all.")
    memory: Bytes | None = Field(None, description="Memory a node's container may use, in bytes or as 64g. /dev/shm counts too. null: all.")

    @model_validator(mode="after")
    def _volumes_are_mounted(self) -> DockerConfig:
        mounted = {source for source, _ in self.docker_mounts}
        if unused := sorted(self.volumes.keys() - mounted):
            example = f"docker_mounts: [[{unused[0]}, /data]]"
            raise wrong("volumes", f"{', '.join(unused)} is mounted nowhere", example)
        return self

    @property
    def caches(self) -> dict[str, str]:
        """Variables that lead programs to cache_dir."""
        if self.cache_dir is None:
            return {}
        folders = {"HF_HOME": "huggingface", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        folders |= {"WANDB_CACHE_DIR": "wandb", "WANDB_DATA_DIR": "wandb", "XDG_CACHE_HOME": ""}
        return {name: str(PurePosixPath(self.cache_dir) / folder) for name, folder in folders.items()}


class NcclConfig(Section):
    """NCCL's own settings, as NCCL_* in the environment of every rank. null leaves one to NCCL; runner.env wins over all."""

    debug: NcclDebug | None = Field(None, description="NCCL_DEBUG: WARN, INFO or TRACE. INFO tells which network each rank uses.")
    ib_disable: bool | None = Field(None, description="NCCL_IB_DISABLE: true keeps to TCP where there is InfiniBand or RoCE. null: false.")
    ib_hca: str | None = Field(None, description="NCCL_IB_HCA: adapters to use, such as mlx5_0,mlx5_1. null: all.")
    ib_gid_index: int | None = Field(None, ge=0, description="NCCL_IB_GID_INDEX: address to use with RoCE, often 3. null: found.")
    ib_timeout: int | None = Field(
        None, ge=1, le=31, description="NCCL_IB_TIMEOUT: lost packets are sent again after 4 us x 2^this. null: 20."
    )
    ib_retry_cnt: int | None = Field(None, ge=0, le=7, description="NCCL_IB_RETRY_CNT: and this often. null: 7.")
    socket_nthreads: int | None = Field(
        None,
        ge=1,
        le=16,
        description="NCCL_SOCKET_NTHREADS: threads for each TCP connection; 4 for fast networks without RDMA. null: 1.",
    )
    nsocks_perthread: int | None = Field(
        None, ge=1, le=16, description="NCCL_NSOCKS_PERTHREAD: sockets for each of these, at most 64 in all. null: 1."
    )
    algo: str | None = Field(None, description="NCCL_ALGO: Ring, Tree and others. null: by the size of each message.")
    proto: str | None = Field(None, description="NCCL_PROTO: LL, LL128 or Simple. null: by the size of each message.")
    buffsize: Bytes | None = Field(None, description="NCCL_BUFFSIZE: buffer between two GPUs, in bytes or as 8m. null: 4 MiB.")
    p2p_disable: bool | None = Field(None, description="NCCL_P2P_DISABLE: true keeps GPUs of one node from talking directly. null: false.")
    shm_disable: bool | None = Field(None, description="NCCL_SHM_DISABLE: true keeps ranks of one node from using /dev/shm. null: false.")
    net_gdr_level: str | None = Field(
        None, pattern="^(LOC|PIX|PXB|PHB|SYS)$", description="NCCL_NET_GDR_LEVEL: how far GPU and adapter may be apart for GPUDirect RDMA."
    )

    @property
    def environment(self) -> dict[str, str]:
        """What of it is set, as variables."""
        values = {
            "NCCL_DEBUG": self.debug,
            "NCCL_IB_DISABLE": self.ib_disable,
            "NCCL_IB_HCA": self.ib_hca,
            "NCCL_IB_GID_INDEX": self.ib_gid_index,
            "NCCL_IB_TIMEOUT": self.ib_timeout,
            "NCCL_IB_RETRY_CNT": self.ib_retry_cnt,
            "NCCL_SOCKET_NTHREADS": self.socket_nthreads,
            "NCCL_NSOCKS_PERTHREAD": self.nsocks_perthread,
            "NCCL_ALGO": self.algo,
            "NCCL_PROTO": self.proto,
            "NCCL_BUFFSIZE": self.buffsize,
            "NCCL_P2P_DISABLE": self.p2p_disable,
            "NCCL_SHM_DISABLE": self.shm_disable,
            "NCCL_NET_GDR_LEVEL": self.net_gdr_level,
        }
        return {name: str(int(value) if isinstance(value, bool) else value) for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _sockets_are_few(self) -> NcclConfig:
        if (sockets := (self.socket_nthreads or 1) * (self.nsocks_perthread or 1)) > _MOST_SOCKETS:
            raise wrong("nsocks_perthread", f"socket_nthreads x nsocks_perthread is {sockets}, and NCCL takes at most {_MOST_SOCKETS}")
        return self


class SwarmConfig(Section):
    """What only a Docker Swarm has."""

    network: Network | None = Field(
        None, description="host: the machines' own network, no overlay. Or an overlay network to join. null: the stack makes its own."
    )
    mtu: int | None = Field(
        None, ge=576, le=65535, description="MTU of the network beneath the overlay, 9000 for jumbo frames. null: 1500."
    )
    encrypted: bool = Field(False, description="Encrypt traffic between nodes. Costs most of the throughput.")
    internal: bool = Field(False, description="The stack's network has no way out: ranks reach each other and nothing else.")
    rdma: bool = Field(
        False, description="InfiniBand or RoCE in the containers: they may lock memory (memlock, IPC_LOCK), NVIDIA_MOFED=enabled."
    )
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
        if self.network and (self.mtu or self.encrypted or self.internal):
            raise wrong("network", "mtu, encrypted and internal belong to the network that the stack makes; an existing one keeps its own")
        return self

    @property
    def on_host_network(self) -> bool:
        return self.network == HOST_NETWORK

    @model_validator(mode="after")
    def _gpus_are_chosen_once(self) -> SwarmConfig:
        if self.gpu_ids and self.gpu is not GpuMode.visible:
            raise wrong("gpu_ids", f"are shown when gpu is visible, and it is {self.gpu}{_SWARM_CHOOSES[self.gpu]}", "gpu: visible")
        return self


class RunnerConfig(Section):
    """Where the job runs, and what is started there."""

    runner_type: RunnerType = Field(
        RunnerType.swarm,
        description="swarm: a Docker Swarm. docker: one engine, no swarm. local: this machine, no Docker. pdsh: hosts, "
        "bare Python over SSH. pdsh_docker: the same, in a container on each. slurm: one job.",
    )
    hosts: Hosts | None = Field(
        None,
        description="Host names or node ids, each with its slots if it likes: 'gpu-1 slots=4', or 'gpu-2 slots=0,2' for these GPUs. "
        "With swarm.network: host also with the address or name that each has on the network that ranks are to use: "
        "'gpu-1 slots=4 address=gpu-1-ib'. Ranges are written out: 'gpu-[01-03,7]'. null: the cluster's own nodes; over SSH, this machine "
        "alone, without SSH.",
    )
    hostsfile: Path | None = Field(None, description="A file with an entry of hosts on each line, comments with #. null: none.")
    python: str | None = Field(
        None, min_length=1, description="Interpreter on hosts over SSH. null: the path of the one that deploys; with pdsh_docker, python3."
    )
    env_file: Path | None = Field(
        None, description="With pdsh and pdsh_docker, a file of NAME=VALUE lines for env, as .deepspeed_env is. null: none."
    )
    env_prefixes: tuple[str, ...] = Field(
        ("NCCL", "PYTHON", "MV2", "UCX"),
        description="With pdsh and pdsh_docker, variables of the shell that deploys go into env if their names begin so; into containers "
        "none that begins with PYTHON.",
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
    master_addr: Host | None = Field(
        None,
        description="With swarm.network: host, a manager's address or name, by which the others find the notice board there; over "
        "SSH, that of the first host. null: the first manager's address in the swarm; the first host's own.",
    )
    master_port: int | None = Field(
        None,
        ge=1,
        le=65534,
        description="Port of the rendezvous store; the notice board listens on the next one. null: 29500; with swarm.network: host "
        "and over SSH, one of 20000 to 29996 by the run's name, so that runs do not meet.",
    )
    interface: Interface | None = Field(
        None,
        description="Interface by which ranks talk, the same on every node: its name (ib0) or its subnet (10.1.0.0/16). "
        "null: the one on the route to the notice board.",
    )
    numa: NumaBinding | None = Field(
        None, description="Bind each rank to cores near its GPU, as torchrun's --numa-binding: node if in doubt. null: any core."
    )
    nccl: NcclConfig = Field(NcclConfig(), description="NCCL's own settings.")
    max_restarts: int = Field(
        3, ge=0, le=1_000_000, description="Failures in a row, without a new step between them, after which the run is given up."
    )
    max_restarts_per_hour: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Failures within an hour, whatever lies between them, after which it is given up too. "
        "null: 20, or max_restarts if that is more.",
    )
    stop_grace: float = Field(90.0, ge=5, le=86400, description="Seconds from SIGTERM to SIGKILL: the time a checkpoint may take.")
    docker_config: DockerConfig = Field(DockerConfig(), description="The container that each node runs.")
    swarm: SwarmConfig = Field(SwarmConfig(), description="What only a Docker Swarm has.")
    slurm: SlurmConfig = Field(SlurmConfig(), description="What only Slurm has.")

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
    def _slurm_gives_all_nodes_the_same(self) -> RunnerConfig:
        if self.runner_type is RunnerType.slurm and len({names.host_slots(host) for host in self.hosts or ()}) > 1:
            raise wrong(
                "hosts", "have different slots, and Slurm gives every node of a job the same", "leave slots out, or make them equal"
            )
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

    @model_validator(mode="after")
    def _addresses_are_of_one_network(self) -> RunnerConfig:
        without = [host for host in self.hosts or () if not names.host_address(host)]
        if self.runner_type is not RunnerType.swarm or len(without) == len(self.hosts or ()):
            return self
        if not self.swarm.on_host_network:
            raise wrong("hosts", "address= is for swarm.network: host; containers in an overlay network have addresses of its own")
        if without:
            raise wrong("hosts", f"{without[0]!r} has no address=, and others have: ranks would meet on two networks", "give one to each")
        if self.interface:
            raise wrong("interface", "the addresses in hosts say already by which interface ranks talk", "leave one of the two out")
        return self

    @model_validator(mode="after")
    def _board_is_found(self) -> RunnerConfig:
        if self.master_addr and not (self.on_machines_network or self.swarm.on_host_network):
            raise wrong("master_addr", "is for swarm.network: host; in a network of containers the notice board has a name")
        return self

    @model_validator(mode="after")
    def _hosts_are_listed_once(self) -> RunnerConfig:
        if self.hosts is not None and self.hostsfile is not None:
            raise wrong("hostsfile", "hosts are listed in the config too", "keep one of the two")
        return self

    @property
    def on_machines_network(self) -> bool:
        """Whether nodes share their machines' own network, and their ports."""
        return self.swarm.on_host_network if self.runner_type is RunnerType.swarm else self.runner_type in OVER_SSH

    @property
    def restarts_per_hour(self) -> int:
        """max_restarts_per_hour with its default filled in."""
        return max(_RESTARTS_PER_HOUR, self.max_restarts) if self.max_restarts_per_hour is None else self.max_restarts_per_hour

    @property
    def node_range(self) -> tuple[int, int, int]:
        """min_nodes, nodes and max_nodes with their defaults filled in."""
        nodes = self.nodes or (len(self.hosts) if self.hosts else self.min_nodes or 1)
        return self.min_nodes or nodes, nodes, self.max_nodes or nodes
