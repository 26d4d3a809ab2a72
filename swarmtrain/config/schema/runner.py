"""`runner`: where the job runs and what it starts, with the settings of every launcher."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from swarmtrain.config.schema.fields import host_entry, overlay_subnet, validators
from swarmtrain.config.schema.fields.duration import Duration
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.fields.validators import HOST_NETWORK
from swarmtrain.config.schema.runner_types import (
    BUILT_IN_LAUNCHERS,
    DEPLOYED_CONTEXT,
    Capabilities,
    NodeNetwork,
    RunnerType,
    find_capabilities,
)
from swarmtrain.config.schema.section import Section, build_field_error, format_duplicates
from swarmtrain.config.schema.slurm import SlurmConfig
from swarmtrain.config.user_files import get_shipped_name

_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_NODES = 10_000
_DEFAULT_RESTARTS_PER_HOUR = 20
_MAX_SIZE_BYTES = 1 << 62
_MAX_SOCKETS = 64
_DEFAULT_SCRIPT = Path("training_code.py")
CLASS_PATTERN = r"^[a-z][a-z0-9_-]{0,30}$"
"""Pattern of the name of a priority class."""
QUEUE_KEYS = ("priority", "preemptible", "time_limit", "on_time_limit", "share")
"""Keys of this section that only a queue uses. The nodes do not receive them, so that changing them restarts nothing."""
MODULE_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


def _parse_byte_size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", value.lower())
    if match is None:
        raise ValueError("must be a number of bytes, or a size such as 512m or 16g")
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if size > _MAX_SIZE_BYTES:
        raise ValueError("exceeds what any machine has")
    return int(size)


def _parse_mount_pairs(value: Any) -> Any:
    """Convert a flat list (source, target, source, target …), the notation in Scaling's guide, to a tuple of pairs.

    A list of pairs is also converted, and a flat list in it; other values are returned unchanged. Raises ValueError for a flat list of odd
    length.
    """
    if not isinstance(value, list):
        return value
    if value and all(isinstance(item, str) for item in value):
        if len(value) % 2:
            raise ValueError("a flat list must have an even length: source, target, source, target …")
        return tuple(zip(value[::2], value[1::2], strict=True))
    pairs: list[Any] = []
    for item in value:
        is_flat = isinstance(item, list) and len(item) > 2 and all(isinstance(text, str) for text in item)
        pairs += _parse_mount_pairs(item) if is_flat else [tuple(item) if isinstance(item, list) else item]
    return tuple(pairs)


def _stringify_gpu_ids(value: Any) -> Any:
    """Return the list `value` as a tuple with numbers converted to strings, since a GPU id is a number or a UUID.

    A value that is not a list is returned unchanged.
    """
    return tuple(str(item) if type(item) is int else item for item in value) if isinstance(value, list) else value


ByteSize = Annotated[int, BeforeValidator(_parse_byte_size, json_schema_input_type=int | str), Field(ge=1, le=_MAX_SIZE_BYTES)]
Mounts = Annotated[
    tuple[tuple[str, str], ...],
    BeforeValidator(_parse_mount_pairs, json_schema_input_type=tuple[tuple[str, ...] | str, ...]),
    AfterValidator(validators.check_mounts),
]
Volumes = Annotated[dict[str, dict[str, str]], AfterValidator(validators.check_volumes)]
ContainerPath = Annotated[str, AfterValidator(validators.check_container_path)]
ContainerUser = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value, json_schema_input_type=int | str),
    AfterValidator(validators.check_user_id),
]
ImageReference = Annotated[str, AfterValidator(validators.check_image_reference)]
NetworkName = Annotated[str, AfterValidator(validators.check_network_name)]
NetworkInterface = Annotated[str, AfterValidator(validators.check_network_interface)]
OverlaySubnet = Annotated[str, AfterValidator(overlay_subnet.check_overlay_subnet)]
NodeLabels = Annotated[dict[str, str], AfterValidator(validators.check_node_labels)]
HostText = Annotated[str, AfterValidator(host_entry.check_host_entry)]
HostTexts = Annotated[tuple[HostText, ...], BeforeValidator(host_entry.expand_host_ranges)]
GpuIds = Annotated[
    tuple[str, ...],
    BeforeValidator(_stringify_gpu_ids, json_schema_input_type=tuple[int | str, ...]),
    AfterValidator(host_entry.check_gpu_ids),
]
# The reader of YAML files turns numbers in these two into text.
EnvironmentVariables = Annotated[
    dict[str, str],
    AfterValidator(validators.check_environment),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}, mode="validation"),
]
ScriptArguments = Annotated[
    tuple[str, ...],
    AfterValidator(validators.check_arguments),
    WithJsonSchema({"type": "array", "items": {"type": ["string", "number"]}}, mode="validation"),
]


class GpuMode(StrEnum):
    """How containers get access to GPUs."""

    none = "none"
    visible = "visible"
    reserve = "reserve"


class NcclDebug(StrEnum):
    """Log levels of NCCL (NCCL_DEBUG)."""

    version = "VERSION"
    warn = "WARN"
    info = "INFO"
    trace = "TRACE"


class NumaBinding(StrEnum):
    """NUMA binding: which CPU cores each rank is bound to, depending on its GPU."""

    node = "node"
    socket = "socket"
    exclusive = "exclusive"
    core_complex = "core-complex"


class TimeLimitAction(StrEnum):
    """What happens to a run that has saved because it has reached its time limit."""

    stop = "stop"
    requeue = "requeue"


_GPU_MODE_NOTES = {GpuMode.none: "", GpuMode.visible: "", GpuMode.reserve: ": Swarm assigns any free GPUs"}


class DockerConfig(Section):
    """Settings of the container in which each node runs."""

    docker_container: ImageReference = Field("registry.lab:5000/swarmtrain:latest", description="Image reference, including the registry.")
    docker_mounts: Mounts = Field(
        (), description="Mounts: pairs of a path on every node (or a volume name) and a path in the container. Put shared disks here."
    )
    volumes: Volumes = Field(
        {},
        description="Volumes in docker_mounts: name to options of Docker's local driver, for NFS {type: nfs, o: "
        "'addr=nas,rw', device: ':/export'}. Changed options create a new volume. A volume not listed here "
        "is an empty folder local to each node.",
    )
    cache_dir: ContainerPath | None = Field(
        None,
        description="Folder in the container for downloads and compilation caches (Hugging Face, inductor, Triton, "
        "wandb). It outlives containers only inside a mount, as with docker_mounts: [[cache, /cache]]. null: "
        "HOME.",
    )
    user: ContainerUser | None = Field(
        None,
        description="UID, or UID:GID, of the ranks, as 1000:1000. It must be able to write to save_dir. null: the owner "
        "of the save_dir folder if it is in a mount, visible to the machine that deploys and not root's; "
        "else the image's user. A running run keeps its user.",
    )
    shm_size: ByteSize = Field(2**30, description="Size of /dev/shm, in bytes or as 8g. Docker's default of 64 MiB is too small for NCCL.")
    docker_sudo: bool = Field(False, description="With ssh_docker: run docker by passwordless sudo.")
    privileged: bool = Field(False, description="With ssh_docker: docker run --privileged. Not needed for devices or /dev/shm.")
    cpus: float | None = Field(None, ge=0.01, le=65536, description="CPU limit of a node's container. null: all.")
    memory: ByteSize | None = Field(
        None, description="Memory limit of a node's container, in bytes or as 64g, including /dev/shm. null: all."
    )

    @model_validator(mode="after")
    def _check_volumes_mounted(self) -> DockerConfig:
        mounted = {source for source, _ in self.docker_mounts}
        if unused := sorted(self.volumes.keys() - mounted):
            example = f"mount it, such as docker_mounts: [[{unused[0]}, /data]]"
            raise build_field_error("volumes", f"{', '.join(unused)} is not mounted anywhere", example)
        return self

    @property
    def cache_variables(self) -> dict[str, str]:
        """Environment variables that make libraries keep their caches in cache_dir."""
        if self.cache_dir is None:
            return {}
        folders = {"HF_HOME": "huggingface", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        folders |= {"WANDB_CACHE_DIR": "wandb", "WANDB_DATA_DIR": "wandb", "XDG_CACHE_HOME": ""}
        return {name: str(PurePosixPath(self.cache_dir) / folder) for name, folder in folders.items()}


class NcclConfig(Section):
    """NCCL settings, passed to every rank as NCCL_* variables. null leaves a setting to NCCL; runner.env takes precedence over all."""

    debug: NcclDebug | None = Field(
        None, description="NCCL_DEBUG: VERSION, WARN, INFO or TRACE. INFO logs which network each rank uses. null: not set."
    )
    ib_disable: bool | None = Field(None, description="NCCL_IB_DISABLE: true uses TCP even where there is InfiniBand or RoCE. null: false.")
    ib_hca: str | None = Field(None, description="NCCL_IB_HCA: network adapters to use, such as mlx5_0,mlx5_1. null: all.")
    ib_gid_index: int | None = Field(None, ge=0, description="NCCL_IB_GID_INDEX: GID index for RoCE, often 3. null: chosen by NCCL.")
    ib_timeout: int | None = Field(
        None, ge=1, le=31, description="NCCL_IB_TIMEOUT: lost packets are retransmitted after 4 us x 2^this. null: 20."
    )
    ib_retry_cnt: int | None = Field(None, ge=0, le=7, description="NCCL_IB_RETRY_CNT: maximum number of retransmissions. null: 7.")
    socket_nthreads: int | None = Field(
        None,
        ge=1,
        le=16,
        description="NCCL_SOCKET_NTHREADS: threads per TCP connection; 4 for fast networks without RDMA. null: 1.",
    )
    nsocks_perthread: int | None = Field(
        None, ge=1, le=16, description="NCCL_NSOCKS_PERTHREAD: sockets per thread; threads x sockets may be at most 64. null: 1."
    )
    algo: str | None = Field(None, description="NCCL_ALGO: Ring, Tree and others. null: chosen by message size.")
    proto: str | None = Field(None, description="NCCL_PROTO: LL, LL128 or Simple. null: chosen by message size.")
    buffsize: ByteSize | None = Field(None, description="NCCL_BUFFSIZE: buffer between two GPUs, in bytes or as 8m. null: 4 MiB.")
    p2p_disable: bool | None = Field(
        None, description="NCCL_P2P_DISABLE: true disables direct transfers between GPUs of one node. null: false."
    )
    shm_disable: bool | None = Field(None, description="NCCL_SHM_DISABLE: true disables /dev/shm between ranks of one node. null: false.")
    net_gdr_level: str | None = Field(
        None,
        pattern="^(LOC|PIX|PXB|PHB|SYS)$",
        description="NCCL_NET_GDR_LEVEL: maximum distance between GPU and adapter for GPUDirect RDMA: LOC, PIX, PXB, PHB "
        "or SYS. null: chosen by NCCL.",
    )

    @property
    def environment(self) -> dict[str, str]:
        """The NCCL settings that are not null, as environment variables."""
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
    def _check_socket_count(self) -> NcclConfig:
        if (sockets := (self.socket_nthreads or 1) * (self.nsocks_perthread or 1)) > _MAX_SOCKETS:
            raise build_field_error(
                "nsocks_perthread", f"socket_nthreads x nsocks_perthread is {sockets}, but NCCL supports at most {_MAX_SOCKETS}"
            )
        return self


class SwarmConfig(Section):
    """Settings of the Docker Swarm launcher."""

    network: NetworkName | None = Field(
        None,
        description="host: the machines' own network, no overlay. Otherwise the name of an existing overlay network to "
        "join. null: an overlay network created by the stack.",
    )
    mtu: int | None = Field(
        None, ge=576, le=65535, description="MTU of the network below the overlay, in bytes; 9000 for jumbo frames. null: 1500."
    )
    subnet: OverlaySubnet | None = Field(
        None,
        description="Subnet of the stack's network, such as 10.20.0.0/24: one that contains no address the containers must reach. null: "
        "assigned by Swarm; for more than 100 nodes, a part of 10.16.0.0/12, chosen by the run's name.",
    )
    encrypted: bool = Field(False, description="Encrypt traffic between nodes. Costs most of the throughput.")
    internal: bool = Field(False, description="Make the stack's network internal: ranks reach each other and nothing else.")
    rdma: bool = Field(
        False, description="Enable InfiniBand or RoCE in the containers: locked memory (memlock, IPC_LOCK) and NVIDIA_MOFED=enabled."
    )
    gpu: GpuMode | None = Field(
        None,
        description="none: CPU. visible: all GPUs of a host, or gpu_ids. reserve: as many GPUs as slots, reserved in "
        "Swarm for this run alone. null: reserve if the hosts declare GPUs, else visible if swarmtrain doctor has found some, else none.",
    )
    gpu_ids: GpuIds = Field(
        (), description="GPUs visible on every host with gpu: visible, by number or UUID. []: all. For a single host: 'gpu-1 slots=0,2'."
    )
    generic_resource: str = Field(
        "NVIDIA-GPU", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="Generic resource kind to reserve with gpu: reserve."
    )
    labels: NodeLabels = Field({}, description="Use only nodes that have all these labels.")

    @model_validator(mode="after")
    def _check_network_options(self) -> SwarmConfig:
        if self.network and (self.mtu or self.subnet or self.encrypted or self.internal):
            raise build_field_error(
                "network",
                "mtu, subnet, encrypted and internal apply only to a network created by the stack; an existing network keeps its settings",
            )
        return self

    @property
    def is_on_host_network(self) -> bool:
        return self.network == HOST_NETWORK

    @model_validator(mode="after")
    def _check_gpu_ids(self) -> SwarmConfig:
        if self.gpu_ids and self.gpu not in (None, GpuMode.visible):
            raise build_field_error(
                "gpu_ids",
                f"have an effect only with gpu: visible, but gpu is {self.gpu}{_GPU_MODE_NOTES[self.gpu]}",
                "set swarm.gpu: visible, or leave out gpu_ids",
            )
        return self


class RunnerConfig(Section):
    """Where the job runs and what it starts: launcher, hosts, nodes, script and environment."""

    runner_type: RunnerType = Field(
        "swarm",
        description="swarm: a Docker Swarm. docker: one Docker engine without Swarm. local: this machine without Docker. "
        "ssh: Python on hosts over SSH. ssh_docker: containers on hosts over SSH. slurm: one Slurm job. Other packages can add launchers.",
    )
    hosts: HostTexts | None = Field(
        None,
        description="Host names or node ids, optionally with slots: 'gpu-1 slots=4', or 'gpu-2 slots=0,2' for these "
        "GPUs. With swarm.network: host also optionally with the host's address on the ranks' network: "
        "'gpu-1 slots=4 address=gpu-1-ib'. Ranges are expanded: 'gpu-[01-03,7]'. null: the cluster's nodes; "
        "over SSH, this machine only, without SSH.",
    )
    hostsfile: Path | None = Field(None, description="File with one hosts entry per line and # comments, instead of hosts. null: none.")
    python: str | None = Field(
        None,
        min_length=1,
        description="Python interpreter on hosts over SSH. null: the path of the interpreter that deploys; with ssh_docker, python3.",
    )
    env_file: Path | None = Field(
        None, description="With ssh and ssh_docker: file of NAME=VALUE lines that are added to env, as .deepspeed_env. null: none."
    )
    env_prefixes: tuple[str, ...] = Field(
        ("NCCL", "PYTHON", "MV2", "UCX"),
        description="With ssh and ssh_docker: variables of the deploying shell with these prefixes are added to env. "
        "PYTHON* variables are not passed into containers.",
    )
    nodes: int | None = Field(
        None, ge=1, le=_MAX_NODES, description="Number of nodes. null: as many as hosts lists, else min_nodes, else 1."
    )
    min_nodes: int | None = Field(
        None, ge=1, le=_MAX_NODES, description="Minimum number of nodes to train on. null: nodes, so the run waits for a lost node."
    )
    max_nodes: int | None = Field(
        None,
        ge=1,
        le=_MAX_NODES,
        description="Maximum number of nodes that the run can be scaled to without restarting the others. null: nodes.",
    )
    default_gpu_count: int | None = Field(
        None,
        ge=1,
        le=host_entry.MAX_SLOTS,
        description="Slots (ranks) of hosts without slots=. null: the host's GPU count as reported by the cluster, else 1.",
    )
    script: Path = Field(_DEFAULT_SCRIPT, description="Script that torchrun starts in every slot.")
    module: str | None = Field(
        None,
        pattern=MODULE_PATTERN,
        description="Module that torchrun starts in every slot instead of the script, as python -m does. It is one of runner.code, "
        "installed in the image, or in the folder from which runner_type local deploys. null: script.",
    )
    script_args: ScriptArguments = Field((), description="Arguments of the script; numbers are passed as they are written.")
    code: tuple[Path, ...] = Field(
        (),
        description="Files, folders and patterns such as src/**/*.py that are shipped with the run, so that editing them needs no new "
        "image. Relative paths are kept; [.] ships the whole folder, without what git or its .dockerignore ignores.",
    )
    env: EnvironmentVariables = Field(
        {}, description="Environment variables of every rank, for instance NCCL_DEBUG: INFO. Numbers are set as they are written."
    )
    secrets: Annotated[dict[str, Path], AfterValidator(validators.check_secret_names)] = Field(
        {},
        description="Secrets: name to file. Ranks find the path of the file in the variable NAME_FILE; the secret itself "
        "is never in a variable.",
    )
    master_addr: HostText | None = Field(
        None,
        description="With swarm.network: host, the address or name of the manager that runs the coordinator; over SSH, "
        "that of the first host. null: the first manager's address in the swarm; the first host's own "
        "address.",
    )
    master_port: int | None = Field(
        None,
        ge=1,
        le=65534,
        description="Port of the coordinator. null: 29500; with swarm.network: host and over SSH, a port from 20000 to 29996 derived "
        "from the run's name, to avoid collisions between runs.",
    )
    interface: NetworkInterface | None = Field(
        None,
        description="Network interface of the ranks, the same on every node: name (ib0) or subnet (10.1.0.0/16). null: "
        "the interface on the route to the coordinator.",
    )
    numa: NumaBinding | None = Field(
        None, description="Bind each rank to cores near its GPU, as torchrun's --numa-binding: node if in doubt. null: any core."
    )
    nccl: NcclConfig = Field(NcclConfig(), description="NCCL settings.")
    max_restarts: int = Field(
        3, ge=0, le=1_000_000, description="Maximum consecutive restarts without a new step between them; the next failure ends the run."
    )
    max_restarts_per_hour: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Maximum restarts within 1 h, with or without progress; the next failure ends the run. null: 20, or "
        "max_restarts if larger.",
    )
    stop_grace: float = Field(90.0, ge=5, le=86400, description="Seconds from SIGTERM to SIGKILL: the time for a final checkpoint.")
    priority: str | None = Field(
        None,
        pattern=CLASS_PATTERN,
        description="In a queue: the priority class, one of those that swarmtrain queue policy prints. null: the policy's default class.",
    )
    preemptible: bool = Field(
        True, description="In a queue: whether the run may shrink, or save and stop, for one of a higher priority. It resumes by itself."
    )
    time_limit: Duration | None = Field(
        None,
        description="In a queue: maximum time with nodes, in seconds or as 8h. The run saves and stops before it. null: none.",
    )
    on_time_limit: TimeLimitAction = Field(
        TimeLimitAction.stop, description="stop, or requeue: wait again at the end of the queue, and resume from the checkpoint."
    )
    share: bool = Field(
        False,
        description="In a queue: cores and visible GPUs may be used together with other runs that share. Reserved GPUs are never shared.",
    )
    docker_config: DockerConfig = Field(DockerConfig(), description="The container that each node runs.")
    swarm: SwarmConfig = Field(SwarmConfig(), description="Settings of the Docker Swarm launcher.")
    slurm: SlurmConfig = Field(SlurmConfig(), description="Settings of the Slurm launcher.")

    @property
    def host_entries(self) -> tuple[HostEntry, ...]:
        """The parsed entries of `hosts`; empty if no hosts are configured."""
        return tuple(map(HostEntry.parse, self.hosts or ()))

    @property
    def script_name(self) -> str:
        """Path of the script in the folder with the files that are shipped with the run; empty if a module is started."""
        return "" if self.module else get_shipped_name(self.script)

    @model_validator(mode="after")
    def _check_script_or_module(self) -> RunnerConfig:
        if self.module and self.script != _DEFAULT_SCRIPT:
            raise build_field_error("module", "cannot be combined with script in the config", "keep one of the two")
        return self

    @model_validator(mode="after")
    def _check_slots_have_gpus(self) -> RunnerConfig:
        visible_gpu_count = len(self.swarm.gpu_ids)
        for host in self.host_entries:
            if visible_gpu_count and not host.gpus and (host.slots or 0) > visible_gpu_count:
                raise build_field_error("hosts", f"{host.text!r} has more slots than the {visible_gpu_count} GPUs of swarm.gpu_ids")
        if visible_gpu_count and (self.default_gpu_count or 0) > visible_gpu_count:
            raise build_field_error(
                "default_gpu_count", f"{self.default_gpu_count} slots, but swarm.gpu_ids lists only {visible_gpu_count} GPUs"
            )
        return self

    @model_validator(mode="after")
    def _check_node_counts(self) -> RunnerConfig:
        if self.hosts is not None:
            hosts = [host.name for host in self.host_entries]
            if not hosts:
                raise build_field_error("hosts", "is empty: list at least one host, or write null to use the cluster's nodes")
            if duplicates := format_duplicates(hosts):
                raise build_field_error(
                    "hosts",
                    f"names {duplicates} more than once: one service runs on each node",
                    "to run several ranks on one host, set its slots: 'gpu-1 slots=2'",
                )
            if self.nodes is not None and self.nodes > len(hosts):
                raise build_field_error(
                    "nodes", f"{self.nodes}, but hosts lists only {len(hosts)}", "list more hosts, or remove nodes to use all listed hosts"
                )
        low, nodes, high = self.node_range
        if not low <= nodes <= high:
            raise build_field_error(
                "min_nodes" if low > nodes else "max_nodes", f"min_nodes <= nodes <= max_nodes is violated: {low} <= {nodes} <= {high}"
            )
        return self

    @model_validator(mode="after")
    def _check_subnet_size(self) -> RunnerConfig:
        if self.swarm.subnet and (problem := overlay_subnet.describe_size_problem(self.swarm.subnet, self.node_range[2])):
            raise build_field_error("swarm.subnet", problem)
        return self

    @model_validator(mode="after")
    def _check_hosts_listed_once(self) -> RunnerConfig:
        if self.hosts is not None and self.hostsfile is not None:
            raise build_field_error("hostsfile", "cannot be combined with hosts in the config", "keep one of the two")
        return self

    @model_validator(mode="after")
    def _check_launcher_settings(self, info: ValidationInfo) -> RunnerConfig:
        """Check the settings that depend on the launcher, except on a node, where the launcher's package may be missing or broken."""
        if self.runner_type in BUILT_IN_LAUNCHERS or info.context != DEPLOYED_CONTEXT:
            _check_gpus_of_hosts(self)
            _check_equal_slots(self)
            _check_host_addresses(self)
            _check_master_address(self)
        return self

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the launcher. Raises SwarmtrainError if the package that provides the launcher is missing or broken."""
        return find_capabilities(self.runner_type)

    @property
    def is_on_host_network(self) -> bool:
        """Whether the nodes use the host network of their machines instead of a container network."""
        network = self.capabilities.network
        return self.swarm.is_on_host_network if network is NodeNetwork.configured else network is NodeNetwork.host

    @property
    def queue_settings(self) -> dict[str, Any]:
        """The settings for a queue that differ from their defaults, JSON-compatible."""
        return self.model_dump(mode="json", include=set(QUEUE_KEYS), exclude_defaults=True)

    @property
    def effective_max_restarts_per_hour(self) -> int:
        """Maximum number of restarts per hour: max_restarts_per_hour, or its default."""
        return max(_DEFAULT_RESTARTS_PER_HOUR, self.max_restarts) if self.max_restarts_per_hour is None else self.max_restarts_per_hour

    @property
    def node_range(self) -> tuple[int, int, int]:
        """(min_nodes, nodes, max_nodes), with defaults filled in."""
        nodes = self.nodes or (len(self.hosts) if self.hosts else self.min_nodes or 1)
        return self.min_nodes or nodes, nodes, self.max_nodes or nodes


def _check_gpus_of_hosts(runner: RunnerConfig) -> None:
    mode = runner.swarm.gpu
    if mode in (None, GpuMode.visible) or not runner.capabilities.requires_gpu_mode:
        return
    for host in runner.host_entries:
        if host.gpus:
            reason = f"{host.text!r} lists GPUs, but swarm.gpu is {mode}{_GPU_MODE_NOTES[mode]}"
            raise build_field_error("hosts", reason, f"set swarm.gpu to visible, or use '{host.name} slots={host.slots}'")


def _check_equal_slots(runner: RunnerConfig) -> None:
    if runner.capabilities.has_equal_nodes and len({host.slots for host in runner.host_entries}) > 1:
        raise build_field_error(
            "hosts",
            f"have different slot counts, but {runner.runner_type} gives every node of a job the same number",
            "omit slots, or make them equal",
        )


def _check_host_addresses(runner: RunnerConfig) -> None:
    hosts_without_address = [host.text for host in runner.host_entries if not host.address]
    if runner.capabilities.network is not NodeNetwork.configured or len(hosts_without_address) == len(runner.hosts or ()):
        return
    if not runner.swarm.is_on_host_network:
        raise build_field_error(
            "hosts", "address= requires swarm.network: host; in an overlay network, containers have their own addresses"
        )
    if hosts_without_address:
        raise build_field_error(
            "hosts",
            f"{hosts_without_address[0]!r} has no address=, but other hosts do: ranks would use two different networks",
            "set address= for every host",
        )
    if runner.interface:
        raise build_field_error(
            "interface", "conflicts with the addresses in hosts, which already determine the interface", "remove one of the two"
        )


def _check_master_address(runner: RunnerConfig) -> None:
    if runner.master_addr and not (runner.is_on_host_network or runner.swarm.is_on_host_network):
        raise build_field_error("master_addr", "requires swarm.network: host; in an overlay network, ranks find the coordinator by name")
