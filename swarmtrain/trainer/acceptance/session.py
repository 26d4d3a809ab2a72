"""A model, an optimizer and synthetic data, for a few training steps in this process."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from swarmtrain.config import Config
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import Runtime, start_runtime
from swarmtrain.trainer.speed.bench import open_or_generate_data
from swarmtrain.trainer.step import StepRequest, StepResult, train_step

Sections = Mapping[str, Mapping[str, Any]]
"""The values of a config, by section and key."""


@dataclass(frozen=True)
class TrainingSession:
    """A rank with a model, an optimizer and data."""

    runtime: Runtime
    model: ParallelModel
    optimizer: Optimizer
    data: TokenDataset

    def run_step(self, number: int, check_results: Callable[[], None] = lambda: None) -> StepResult:
        """Run step `number`, the first of which is 1, and return its result. Collective: all ranks must call it.

        `check_results`: see StepRequest.
        """
        position = (number - 1) * self.runtime.config.topology.samples_per_step
        request = StepRequest(number, position, StopFlag(), check_results=check_results)
        return train_step(self.runtime, self.model, self.optimizer, self.data, request)


@contextmanager
def open_session(config: Config, *, initialize: bool = True, monitors_peers: bool = False) -> Iterator[TrainingSession]:
    """Context manager: a session that trains `config` on random tokens. Collective: all ranks must call it.

    `initialize`: False leaves all parameters zero until a checkpoint is loaded. `monitors_peers`: the body has a PeerMonitor.
    """
    with start_runtime(config, monitors_peers=monitors_peers) as runtime, open_or_generate_data(runtime) as (data, _):
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), runtime, initialize=initialize)
        yield TrainingSession(runtime, model, Optimizer(model, config), data)


def free_device_memory() -> None:
    """Free the memory of earlier sessions of this process, and start a new maximum of the allocated memory."""
    gc.collect()  # a model is part of reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def build_config(sections: Sections) -> Config:
    """Return the config with the values of `sections`, and defaults for all others."""
    return Config.from_json(json.dumps(sections))
