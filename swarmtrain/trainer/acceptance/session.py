"""A model, an optimizer and synthetic data, for a few training steps in this process."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.trainer.bench import open_or_generate_data
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import Runtime, start_runtime
from swarmtrain.trainer.step import StepResult, train_step

_INITIAL_DEVIATION = 0.02
Sections = Mapping[str, Mapping[str, Any]]
"""The values of a config, by section and key."""


@dataclass(frozen=True)
class TrainingSession:
    """A rank with a model, an optimizer and data."""

    runtime: Runtime
    model: ParallelModel
    optimizer: Optimizer
    data: TokenDataset

    def run_step(self, number: int) -> StepResult:
        """Run step `number`, the first of which is 1, and return its result. Collective: all ranks must call it."""
        position = (number - 1) * self.runtime.config.topology.samples_per_step
        return train_step(
            self.runtime, self.model, self.optimizer, self.data, first_sample_position=position, step=number, stop_flag=StopFlag()
        )


@contextmanager
def open_session(config: Config, *, draws_on_device: bool = False) -> Iterator[TrainingSession]:
    """Context manager: a session that trains `config` on random tokens. Collective: all ranks must call it.

    `draws_on_device`: draw the parameters on the device, which is fast. Their values are not those of training, and differ between ranks.
    """
    with start_runtime(config) as runtime, open_or_generate_data(runtime) as (data, _):
        transformer = Transformer(config.transformer_architecture, config.trainer.seed)
        if draws_on_device:
            transformer.initial_value = partial(_draw_on_device, runtime.device)
        model = parallelize(transformer, runtime)
        yield TrainingSession(runtime, model, Optimizer(model, config), data)


def _draw_on_device(device: torch.device, name: str, shape: torch.Size) -> Tensor:
    """Return ones for the weights of norms, and small normally distributed numbers for all other parameters."""
    return torch.ones(shape, device=device) if len(shape) == 1 else torch.randn(shape, device=device) * _INITIAL_DEVIATION


def free_device_memory() -> None:
    """Free the memory of earlier sessions of this process, and start a new maximum of the allocated memory."""
    gc.collect()  # a model is part of reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def build_config(sections: Sections) -> Config:
    """Return the config with the values of `sections`, and defaults for all others."""
    return Config.from_json(json.dumps(sections))
