"""A model, an optimizer and data, for a few training steps in this process."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from swarmtrain.config import Config
from swarmtrain.trainer import collectives
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import TokenDataset, open_data
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import Runtime, start_runtime
from swarmtrain.trainer.step import StepRequest, StepResult, train_step

_DOCUMENT_COUNT = 64


@dataclass(frozen=True)
class TrainingSession:
    """A rank with a model, an optimizer and data."""

    runtime: Runtime
    model: ParallelModel
    optimizer: Optimizer
    data: TokenDataset
    is_synthetic: bool
    """Whether the data is random tokens."""

    def run_step(self, number: int, check_results: Callable[[], None] = lambda: None) -> StepResult:
        """Run step `number`, the first of which is 1, and return its result. Collective: all ranks must call it.

        `check_results`: see StepRequest.
        """
        position = (number - 1) * self.runtime.config.topology.samples_per_step
        request = StepRequest(number, position, StopFlag(), check_results=check_results)
        return train_step(self.runtime, self.model, self.optimizer, self.data, request)


@contextmanager
def open_session(config: Config, *, initialize: bool = True, monitors_peers: bool = False) -> Iterator[TrainingSession]:
    """Context manager: a session that trains `config`, on random tokens if its token files are missing on any rank.

    Collective: all ranks must call it. `initialize`: False leaves all parameters zero until a checkpoint is loaded. `monitors_peers`: the
    body has a PeerMonitor. Raises SwarmtrainError if the run cannot start.
    """
    with start_runtime(config, monitors_peers=monitors_peers) as runtime, _open_or_generate_data(runtime) as (data, is_synthetic):
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), runtime, initialize=initialize)
        yield TrainingSession(runtime, model, Optimizer(model, config), data, is_synthetic)


@contextmanager
def _open_or_generate_data(runtime: Runtime) -> Iterator[tuple[TokenDataset, bool]]:
    """Yield the training data, and whether the data is synthetic: random tokens are used if token files are missing on any rank."""
    data_config = runtime.config.data
    prefixes = [*data_config.data_prefixes, *chain(*data_config.collect_companion_prefixes())]
    if all(collectives.all_gather_values(bool(prefixes) and all(map(memory_map.has_token_files, prefixes)))):
        yield open_data(runtime.config)[0], False
        return
    folder = Path(tempfile.gettempdir()) / collectives.run_on_rank_zero(lambda: f"swarmtrain-bench-{secrets.token_hex(8)}")
    prefixes = [folder / f"tokens-{row}" for row in range(data_config.rows_per_sample)]
    companions = tuple(prefixes[1:])
    try:
        with runtime.local_rank_zero_first():
            if not runtime.local_rank:
                folder.mkdir(mode=0o700)
                for row, prefix in enumerate(prefixes):
                    _write_random_tokens(prefix, runtime.config, row)
        synthetic_config = type(data_config)(
            data_prefixes=(prefixes[0],),
            rejected_prefixes=companions if data_config.rejected_prefixes else (),
            positive_prefixes=companions[:1] if data_config.positive_prefixes else (),
            negative_prefixes=companions[1:] if data_config.negative_prefixes else (),
            packing=data_config.packing,
        )
        yield open_data(runtime.config.model_copy(update={"data": synthetic_config}))[0], True
    finally:
        if not runtime.local_rank:
            shutil.rmtree(folder, ignore_errors=True)


def _write_random_tokens(prefix: Path, config: Config, row: int) -> None:
    """Write token files for one row of each sample; the rows of a sample differ."""
    architecture = config.transformer_architecture
    document_length = (
        max(1, config.topology.samples_per_step) * (architecture.sequence_length + 1) // _DOCUMENT_COUNT + architecture.sequence_length + 1
    )
    documents = np.random.default_rng((config.trainer.seed, row)).integers(architecture.vocab_size, size=(_DOCUMENT_COUNT, document_length))
    memory_map.write_token_files(prefix, documents, "uint16" if architecture.vocab_size <= np.iinfo(np.uint16).max else "uint32")
