"""The environment of one rank: config, rank, world size, device, process group and random seeds.

    with start_runtime(config) as runtime:
        with runtime.local_rank_zero_first():
            ...                     local rank 0 of each node first, then the other ranks

Works under torchrun (including elastic launch), under plain srun or mpirun, and standalone: see swarmtrain.protocol.distributed_env.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ValidationError

from swarmtrain.config import Config
from swarmtrain.config.loader import load_config
from swarmtrain.config.schema.trainer import DeterminismMode
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.config.validation_errors import convert_validation_error
from swarmtrain.errors import ConfigError, SwarmtrainError, TrainingError
from swarmtrain.protocol import ENV_GPUS, ENV_RUN_ID, distributed_env
from swarmtrain.trainer import collectives, log_setup, out_of_memory
from swarmtrain.trainer.model import float8

_DEFAULT_TIMEOUT = timedelta(minutes=30)

OptionsT = TypeVar("OptionsT", bound=BaseModel)


@dataclass(frozen=True)
class Runtime:
    """The environment of one rank: config, rank, world size, device, run name, node, coordinator address and secrets."""

    config: Config
    rank: int
    world_size: int
    """Number of ranks."""
    local_rank: int
    device: torch.device
    run_name: str
    """Name of the run; "local" if the launcher sets none."""
    node: str
    coordinator_address: str | None
    """host:port of the coordinator; None if there is no coordinator."""
    secret_paths: Mapping[str, str] = field(default_factory=dict)
    """Path of the file of each secret, by the secret's name."""
    run_id: str = ""
    """Id of the run (swarmtrain.protocol.run_identity); empty if it is unknown."""

    @property
    def is_rank_zero(self) -> bool:
        """True if this process is rank 0."""
        return self.rank == 0

    @property
    def output_folder(self) -> Path:
        """Folder for the files that rank 0 writes about the run: logger.log_dir, else trainer.save_dir, else the current folder."""
        return self.config.logger.log_dir or self.config.trainer.save_dir or Path.cwd()

    @contextmanager
    def local_rank_zero_first(self) -> Iterator[None]:
        """Context manager: local rank 0 of each node runs the body first, then the other ranks run it, which can reuse its results."""
        if self.local_rank:
            collectives.barrier()
        yield
        if not self.local_rank:
            collectives.barrier()

    def read_secret(self, name: str) -> str | None:
        """Return the value of the secret `name`, or None if this run has no such secret.

        Raises TrainingError if its file cannot be read.
        """
        if name not in self.secret_paths:
            return None
        try:
            return Path(self.secret_paths[name]).read_text().strip()
        except OSError as error:
            raise TrainingError(
                f"{error.filename}: {describe_os_error(error)}", place=f"secret {name}", hint="give the training user read access to it"
            ) from None


def read_config(argv: Sequence[str]) -> Config:
    """Return the config of this run, and install an exception hook that prints a SwarmtrainError without a traceback.

    If the environment variable SWARMTRAIN_CONFIG is set (by the launcher), the config is read from that JSON file. Otherwise `argv[0]` is
    a YAML file, and each of `argv[1:]` is `-o` or an override `key.path=value`. Raises SwarmtrainError if no config is given, ConfigError
    if the config is invalid.
    """
    _install_excepthook()
    path = os.environ.get("SWARMTRAIN_CONFIG")
    if path:
        return Config.from_json(Path(path).read_text())
    if not argv:
        script = Path(sys.argv[0]).name
        raise SwarmtrainError("needs a config", place=script, hint=f"pass a config file: python {script} examples/quickstart.yml")
    return load_config(argv[0], [argument for argument in argv[1:] if argument != "-o"])


def read_options(options_class: type[OptionsT], config: Config) -> OptionsT:
    """Return the config's `script` section, validated by the user's pydantic class `options_class`.

    Raises ConfigError with all validation errors.
    """
    try:
        return options_class.model_validate(config.script)
    except ValidationError as error:
        raise ConfigError(tuple(convert_validation_error(error, options_class, {}, prefix="script."))) from None


@contextmanager
def start_runtime(config: Config, *, monitors_peers: bool = False) -> Iterator[Runtime]:
    """Context manager: initialize logging, device and process group from environment variables; destroy the process group at the end.

    `monitors_peers`: the body only trains a parallel model with Run.prepare_training, which notices dead peers itself. Otherwise torch ends
    the process if a peer dies during a collective over NCCL, and no just-in-time checkpoint is saved.

    A process group that the script has already initialized is used unchanged, and not destroyed. Raises TrainingError if the environment
    variables are invalid; and on every rank, if the config enables float8 and any rank's device does not support it.
    """
    environ = os.environ
    try:
        environ |= distributed_env.detect_torchrun_env(environ)
    except ValueError as error:
        raise TrainingError(str(error), place="this process's environment") from None
    rank, world_size, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    already_initialized = dist.is_initialized()
    if already_initialized:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    log_setup.configure_logging(config, rank, world_size)
    device = _select_device(local_rank)
    _configure_determinism(device, config.trainer.deterministic)
    torch.autograd.set_detect_anomaly(config.trainer.detect_anomaly)
    runtime = Runtime(
        config,
        rank,
        world_size,
        local_rank,
        device,
        run_name=environ.get("SWARMTRAIN_RUN", "local"),
        node=distributed_env.get_node_name(environ),
        coordinator_address=environ.get("SWARMTRAIN_COORDINATOR") or None,
        secret_paths=json.loads(environ.get("SWARMTRAIN_SECRETS") or "{}"),
        run_id=environ.get(ENV_RUN_ID, ""),
    )
    if not already_initialized:
        _init_process_group(runtime, monitors_peers=monitors_peers)
    _check_same_device_type(runtime)
    _install_excepthook()  # init_process_group has installed its own hook, which prefixes every line with the rank
    if config.transformer_architecture.float8_layers:
        collectives.run_on_all_ranks(lambda: float8.check_float8_support(config.transformer_architecture, device))
    try:
        with out_of_memory.explain_out_of_memory_error(f"rank {runtime.rank}"):
            yield runtime
    except SystemExit:
        _destroy_process_group(already_initialized)
        raise
    # After any other exception the process group is not destroyed, since this could wait for a dead peer; its sockets close at exit.
    _destroy_process_group(already_initialized)


def set_collective_timeout(timeout_seconds: float | None, groups: Sequence[dist.ProcessGroup]) -> None:
    """Set the timeout, in seconds, after which a collective of `groups` over gloo that waits for a peer raises an error. None: 30 min.

    Over NCCL, a collective that waits too long ends the process instead, so its timeout stays that of torch (see health/peer_monitor.py).
    """
    timeout = _DEFAULT_TIMEOUT if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    for group in groups:
        backend = _find_gloo_backend(group)
        if backend is not None:
            backend._set_default_timeout(timeout)  # torch has no public function for this; a frozen peer would be detected after 30 min


def _find_gloo_backend(group: dist.ProcessGroup) -> dist.ProcessGroupGloo | None:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group has no backend for the CPU
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _init_process_group(runtime: Runtime, *, monitors_peers: bool) -> None:
    backend = "cpu:gloo,cuda:nccl" if runtime.device.type == "cuda" else "gloo"
    if monitors_peers:
        # Otherwise torch ends the process if a peer dies. torch's agent sets this variable to 1 for all ranks, so it is set here.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(
        backend, store=_create_store(runtime), rank=runtime.rank, world_size=runtime.world_size, timeout=_DEFAULT_TIMEOUT
    )


_last_process_group: list[object] = []
"""The default process group that this process destroyed last, kept alive on purpose.

The destructor of a gloo group waits for a thread that may need the GIL at that moment. If DistributedDataParallel held the last reference
to the group, a script could hang when it frees its model.
"""


def _destroy_process_group(already_initialized: bool) -> None:
    if not already_initialized:
        _last_process_group[:] = [dist.group.WORLD]
        dist.destroy_process_group()


def _check_same_device_type(runtime: Runtime) -> None:
    """Raise TrainingError if some ranks have a GPU and others do not: they would wait for each other on different backends."""
    devices = collectives.all_gather_values((runtime.device.type, runtime.node))
    if len({device_type for device_type, _ in devices}) > 1:
        rank, node = next((rank, node) for rank, (device_type, node) in enumerate(devices) if device_type == "cpu")
        hint = (
            "run swarmtrain doctor CONFIG to see the GPUs in each node's container, or set runner.swarm.gpu: none to train "
            "on the CPUs of all nodes"
        )
        error = TrainingError("sees no GPU, but other ranks of this run do", place=f"rank {rank} on {node}", hint=hint)
        error.rank = rank
        raise error


def _create_store(runtime: Runtime) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    uses_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store = dist.TCPStore(
        address, port, runtime.world_size, is_master=runtime.is_rank_zero and not uses_agent_store, timeout=_DEFAULT_TIMEOUT
    )
    if uses_agent_store and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun --standalone and static rendezvous keep one store for all attempts, which still holds the keys of the last
        # attempt. With a single agent, its restart count distinguishes attempts; with several agents the count differs between them.
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


def _select_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        _check_run_uses_no_gpus()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local_rank = 0  # srun and mpirun may expose only its own GPU to each rank
    if local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"has no GPU for its local rank {local_rank}: the number of visible GPUs is {torch.cuda.device_count()}",
            place=f"node {os.environ.get('SWARMTRAIN_NODE', 'here')}",
            hint="set the slots of this node in runner.hosts to its number of GPUs",
        )
    device = torch.device("cuda", local_rank)
    _configure_gpu_allocator(os.environ)
    torch.cuda.set_device(device)
    return device


def _configure_gpu_allocator(environ: Mapping[str, str]) -> None:
    """Let segments of GPU memory grow, so that less memory is lost to fragmentation, unless `environ` configures torch's allocator."""
    if not any(name in environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # torch has no public function for this


def _check_run_uses_no_gpus() -> None:
    """Raise TrainingError with torch's reason if the run uses GPUs, since it would train on CPUs instead."""
    if ENV_GPUS not in os.environ:
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch does not annotate it
        reason = "torch finds no CUDA device"
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built without CUDA
        reason = str(error).strip().splitlines()[0]
    raise TrainingError(
        f"the run uses GPUs, but torch cannot use CUDA: {reason}",
        place=f"node {distributed_env.get_node_name(os.environ)}",
        hint="run swarmtrain doctor CONFIG to see the GPUs and drivers of the nodes, or set runner.swarm.gpu: none to train on CPUs",
    )


def _configure_determinism(device: torch.device, mode: DeterminismMode) -> None:
    # All CPU operations that swarmtrain's models use are deterministic.
    if mode is DeterminismMode.require or (mode is DeterminismMode.prefer and device.type == "cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix multiplication
        torch.use_deterministic_algorithms(True, warn_only=mode is DeterminismMode.prefer)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module property that is missing in torch's stub


def _install_excepthook() -> None:
    """Install an exception hook that prints a SwarmtrainError without a traceback, and passes other errors to the previous hook."""
    previous_hook = sys.excepthook

    def print_error(error_class: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SwarmtrainError):
            sys.stderr.write(error.plain_text)
        else:
            previous_hook(error_class, error, trace)

    sys.excepthook = print_error
