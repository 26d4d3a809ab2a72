"""The stages of the acceptance run, in the order in which they run: what is most likely to fail comes first."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.trainer.acceptance.rows import Row

_CPU_LIMIT_FACTOR = 5.0


@dataclass(frozen=True)
class Stage:
    """One stage: its module in checks, whose function `run` yields the rows, and how long it may take."""

    name: str
    """The name of the module, and of the stage."""
    description: str
    gpu_seconds: float
    """Time limit on a GPU, in seconds."""
    is_timed: bool = False
    """Whether it needs the GPU for itself. Other stages share it, and run at the same time."""


@dataclass(frozen=True)
class StageContext:
    """What a stage needs to know of the machine."""

    device_type: str
    """cuda or cpu."""
    gpu_count: int
    folder: str
    """A folder for the stage's files, which is removed afterwards."""

    def scale_limit(self, seconds: float) -> float:
        """Return the time limit for what may take `seconds` on a GPU. On the CPU it is longer: that machine may be busy or slow."""
        return seconds if self.is_cuda else _CPU_LIMIT_FACTOR * seconds

    @property
    def is_cuda(self) -> bool:
        """True if the stage runs on a GPU."""
        return self.device_type == "cuda"


STAGES = (
    Stage("facts", "versions, memory bandwidth and matrix products", 60, is_timed=True),
    Stage("launched_run", "deploy, stop and resume a run with the commands of swarmtrain", 150),
    Stage("equivalence", "losses and gradient norms, compared with float32 on the CPU", 150),
    Stage("determinism", "repeated and resumed runs, compared bit by bit", 180),
    Stage("mask_costs", "time and memory of attention masks", 60),
    Stage("throughput", "tokens per second, compared with a loop of torch alone", 270, is_timed=True),
    Stage("step_costs", "host synchronizations, kernels and idle time in a step", 90, is_timed=True),
    Stage("checkpoint_costs", "seconds to draw, save and load a model", 90, is_timed=True),
    Stage("memory_accuracy", "estimated and measured memory", 75, is_timed=True),
    Stage("multiple_ranks", "several ranks, compared with one; out of memory", 150, is_timed=True),
)


def run_stage(name: str, context: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the stage `name`; called in a process of its own, with the values of a StageContext."""
    yield from importlib.import_module(f"{__package__}.checks.{name}").run(StageContext(**context))
