"""A rank's surroundings: its config, place in the world, device, process group, seeds.

    with runtime.start(config) as here:
        with here.local_first():
            ...                     one rank of each node first, then the others

Works under torchrun and its elastic agent, under plain srun or mpirun, and alone: see swarmtrain.world.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ValidationError

from swarmtrain import world
from swarmtrain.config import Config
from swarmtrain.config.explain import explain
from swarmtrain.config.files import reason
from swarmtrain.config.load import load
from swarmtrain.config.trainer import Deterministic
from swarmtrain.errors import ConfigError, SwarmtrainError, TrainingError
from swarmtrain.trainer import agreement, shortage, spoken
from swarmtrain.trainer.model import float8

_PATIENCE = timedelta(minutes=30)

Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class Runtime:
    """What a rank knows of its surroundings."""

    config: Config
    rank: int
    size: int
    """Ranks in the world."""
    local_rank: int
    device: torch.device
    run: str
    """Name of the run."""
    node: str
    board: str | None
    """host:port of the notice board, if there is one."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Name of a secret to the path of its file."""

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """Where rank 0 writes what the run says of itself."""
        return self.config.logger.log_dir or self.config.trainer.save_dir or Path.cwd()

    @contextmanager
    def local_first(self) -> Iterator[None]:
        """Run the body on local rank 0 of each node, then on the others: the first prepares, the others find it done."""
        if self.local_rank:
            agreement.barrier()
        yield
        if not self.local_rank:
            agreement.barrier()

    def secret(self, name: str) -> str | None:
        """Return the secret `name`, or None if this run has none of that name. Raises TrainingError if its file is unreadable."""
        if name not in self.secrets:
            return None
        try:
            return Path(self.secrets[name]).read_text().strip()
        except OSError as error:
            raise TrainingError(
                f"{error.filename}: {reason(error)}", place=f"secret {name}", hint="the user that trains must be able to read it"
            ) from None


def read_config(argv: Sequence[str]) -> Config:
    """Return the config of this run: the launcher's (SWARMTRAIN_CONFIG) if it left one, else the YAML file `argv[0]`,
    changed by `argv[1:]`, each `-o` or `key.path=value`.

    From here on errors of ours that nobody catches are told without a traceback.
    Raises SwarmtrainError if there is no config, ConfigError if it is wrong.
    """
    _be_brief()
    path = os.environ.get("SWARMTRAIN_CONFIG")
    if path:
        return Config.from_json(Path(path).read_text())
    if not argv:
        script = Path(sys.argv[0]).name
        raise SwarmtrainError("needs a config", place=script, hint=f"python {script} examples/quickstart.yml")
    return load(argv[0], [argument for argument in argv[1:] if argument != "-o"])


def read_options(kind: type[Options], config: Config) -> Options:
    """Return the config's `script` section as the user's own pydantic class `kind`.

    Raises ConfigError with everything that is wrong with it.
    """
    try:
        return kind.model_validate(config.script)
    except ValidationError as error:
        raise ConfigError(tuple(explain(error, kind, {}, prefix="script."))) from None


@contextmanager
def start(config: Config) -> Iterator[Runtime]:
    """Join the world that the environment describes, and leave it at the end; one that the script has joined is taken as it is.

    Raises TrainingError on every rank alike if the device of one has no float8 and the config asks for it.
    """
    environ = os.environ
    try:
        environ |= world.find(environ)
    except ValueError as error:
        raise TrainingError(str(error), place="this process's environment") from None
    rank, size, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    joined = dist.is_initialized()
    if joined:
        rank, size = dist.get_rank(), dist.get_world_size()
    spoken.begin(config, rank, size)
    device = _device(local_rank)
    _be_deterministic(device, config.trainer.deterministic)
    torch.autograd.set_detect_anomaly(config.trainer.detect_anomaly)
    here = Runtime(
        config,
        rank,
        size,
        local_rank,
        device,
        run=environ.get("SWARMTRAIN_RUN", "local"),
        node=world.node(environ),
        board=environ.get("SWARMTRAIN_BOARD") or None,
        secrets=json.loads(environ.get("SWARMTRAIN_SECRETS") or "{}"),
    )
    if not joined:
        _join(here)
    _agree_on_devices(here)
    _be_brief()  # torch has put its own before ours, and names the rank in every line
    if config.transformer_architecture.float8:
        agreement.by_every_rank(lambda: float8.check(config.transformer_architecture, device))
    try:
        with shortage.told(f"rank {here.rank}"):
            yield here
    except SystemExit:
        _leave(joined)
        raise
    # After any other exception the process dies with its sockets: taking the group down in order could wait for a dead peer.
    _leave(joined)


def seed(*parts: object) -> None:
    """Seed every generator of random numbers from `parts`: the same parts, the same numbers, whatever came before."""
    value = derived_seed(*parts)
    random.seed(value)
    np.random.seed(value % 2**32)
    seed_torch(value)


def seed_torch(value: int) -> None:
    """Seed torch's generators in use. torch.manual_seed notes each call with its traceback where CUDA is not: 2 ms, and kept for ever."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own is not typed
        torch.cuda.manual_seed_all(value)


def derived_seed(*parts: object) -> int:
    """Return a number below 2^63 that is a hash of `parts`."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def set_patience(seconds: float | None, groups: Sequence[dist.ProcessGroup]) -> None:
    """Set how long a collective of `groups` may wait for a peer before it raises. None: half an hour."""
    timeout = _PATIENCE if seconds is None else timedelta(seconds=seconds)
    for group in groups:
        # torch has no public call for this; without it a stopped peer is noticed after 30 minutes.
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _join(here: Runtime) -> None:
    backend = "cpu:gloo,cuda:nccl" if here.device.type == "cuda" else "gloo"
    if "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(backend, store=_store(here), rank=here.rank, world_size=here.size, timeout=_PATIENCE)


_left: list[object] = []
"""The world that this process left last. gloo waits in its destructor for a thread that may want what Python holds just then: were
DistributedDataParallel the last to have it, a script could hang when it is done with its model."""


def _leave(joined: bool) -> None:
    if not joined:
        _left[:] = [dist.group.WORLD]
        dist.destroy_process_group()


def _agree_on_devices(here: Runtime) -> None:
    """Raise TrainingError if some ranks have a GPU and others have none: each would wait for the others at another backend."""
    found = agreement.gather((here.device.type, here.node))
    if len({kind for kind, _ in found}) > 1:
        rank, node = next((rank, node) for rank, (kind, node) in enumerate(found) if kind == "cpu")
        hint = "swarmtrain doctor CONFIG shows what each node's container sees; runner.swarm.gpu: none trains on CPUs everywhere"
        error = TrainingError("sees no GPU, and other ranks of this run do", place=f"rank {rank} on {node}", hint=hint)
        error.rank = rank
        raise error


def _store(here: Runtime) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents_own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store = dist.TCPStore(address, port, here.size, is_master=here.first and not agents_own, timeout=_PATIENCE)
    if agents_own and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun --standalone and static rendezvous keep one store over all attempts, in which the keys of the last
        # attempt would be found. With a single agent its restart count tells attempts apart; with several it differs.
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local_rank = 0  # srun and mpirun may have shown each rank its own GPU alone
    if local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"has no GPU for its local rank {local_rank}: it shows {torch.cuda.device_count()}",
            place=f"node {os.environ.get('SWARMTRAIN_NODE', 'here')}",
            hint="runner.hosts: give it as many slots as GPUs",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _be_deterministic(device: torch.device, kind: Deterministic) -> None:
    # The CPU's operations are as they are wanted, but for some that no model here uses.
    if kind is Deterministic.require or (kind is Deterministic.prefer and device.type == "cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrices are multiplied
        torch.use_deterministic_algorithms(True, warn_only=kind is Deterministic.prefer)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module property unknown to its stub


def _be_brief() -> None:
    """Let errors of ours that nobody catches be told without a traceback, and all others as before."""
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SwarmtrainError):
            sys.stderr.write(error.text)
        else:
            before(kind, error, trace)

    sys.excepthook = tell
