"""Figures of weights, activations and gradients every so many steps, as `tensor-statistics.jsonl`: a line a tensor.

They are those of whole tensors, however these are divided: each part is counted by one of the ranks that hold it. Of an
activation all micro batches of the step count, on every rank: where ranks that share a layer have the same, as often.
Nothing is changed on the way, and between records nothing is done.
"""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swarmtrain.config.tensor_statistics import Statistic, TensorKind
from swarmtrain.trainer import agreement
from swarmtrain.trainer.metrics import figures
from swarmtrain.trainer.metrics.sinks.lines import MetricsFile
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.passes import NARROW
from swarmtrain.trainer.runtime import Runtime

Key = tuple[TensorKind, str]


class Recorder:
    """Looks at the tensors of this rank's part of a model; does nothing if the config does not ask for it."""

    def __init__(self, here: Runtime, model: ParallelModel, resumed_at: int) -> None:
        """`resumed_at`: the step trained on from. Called by all ranks together. Raises TrainingError if there can be no file."""
        self._config = config = here.config.trainer.tensor_statistics_recorder_config
        if config is None:
            return
        self._model, self._first_copy = model, model.mesh.device_mesh.get_local_rank("replica") == 0
        self._narrow = NARROW.get(here.config.transformer_architecture.precision, torch.float32)
        self._file = MetricsFile(here.folder, resumed_at, "tensor-statistics.jsonl") if here.first else None
        self._modules = {name: module for name, module in model.local.named_modules() if self._watches(name, module)}
        self._wanted: dict[Key, tuple[Statistic, ...]] = {}
        self._types = {name: kind for of_rank in agreement.gather(self._named()) for name, kind in of_rank.items()}
        for kind in config.kinds:
            for name in self._types if "activation" in kind else model.trained if kind is TensorKind.gradients else model.names:
                if wanted := self._figures(name):
                    self._wanted[kind, name] = wanted
        self._number: int | None = None
        self._hooks: list[Any] = []

    def before_step(self, number: int) -> None:
        """Look at the weights, and from now on at what modules return, if step `number` is to be recorded."""
        if self._config is None or number % self._config.interval:
            return
        self._number = number
        self._rows: dict[Key, Tensor] = {}
        self._counts: dict[Key, Tensor] = defaultdict(lambda: torch.zeros(figures.BINS, dtype=torch.int64))
        for name, parameter in self._model.parameters.items():
            self._add_part(TensorKind.weights, name, parameter)
        if any("activation" in kind for kind in self._config.kinds):
            for name, module in self._modules.items():
                self._hooks.append(module.register_forward_hook(partial(self._returned, name)))

    def passed(self) -> None:
        """Look at the gradients, which are summed and not yet clipped, and write down what was found. Called by all ranks together."""
        if self._config is None or self._number is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name, parameter in self._model.parameters.items():
            if parameter.grad is not None:
                self._add_part(TensorKind.gradients, name, parameter.grad)
        everybody = agreement.to_first_rank(torch.stack([self._rows.get(key, figures.nothing()).cpu() for key in self._wanted]))
        rows = reduce(figures.merged, everybody) if everybody else torch.empty(len(self._wanted), 0)
        for row, (key, wanted) in zip(rows, self._wanted.items(), strict=True):
            values = None
            if figures.ordered(wanted):
                values = self._counts[key].cpu()
                dist.reduce(values, 0)
            if self._file and row[figures.ALL]:
                self._file.write(self._line(key, row, figures.figures(row, wanted, values)))
        self._number = None

    def close(self) -> None:
        """Close the file."""
        if self._config and self._file:
            self._file.close()

    def _line(self, key: Key, row: Tensor, found: dict[str, Any]) -> dict[str, Any]:
        kind, name = key
        line: dict[str, Any] = {"step": self._number, "name": name, "kind": str(kind)}
        if self._config and self._config.include_module_type:
            line["type"] = self._types[name if name in self._types else name.rpartition(".")[0]]
        return {**line, "count": int(row[figures.ALL]), **found}

    def _returned(self, name: str, _module: nn.Module, _given: Any, made: Any) -> None:
        """A module has returned. What a backward pass computes again has been seen."""
        if not isinstance(made, Tensor) or not made.is_floating_point() or torch._C._current_graph_task_id() != -1:
            return
        self._add(TensorKind.activations, name, made)
        if made.requires_grad and (TensorKind.activation_gradients, name) in self._wanted:
            made.register_hook(partial(self._came_back, name))  # type: ignore[no-untyped-call]  # torch's own is not typed

    def _came_back(self, name: str, gradient: Tensor) -> None:
        self._add(TensorKind.activation_gradients, name, gradient)

    def _add_part(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        if self._first_copy and self._model.shards.counts_here(name):
            self._add(kind, name, tensor)

    @torch.no_grad()
    def _add(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        key = kind, name
        if key not in self._wanted:
            return
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        row = figures.of(here, self._narrow)
        self._rows[key] = figures.merged(self._rows[key], row) if key in self._rows else row
        if figures.ordered(self._wanted[key]):
            self._counts[key] += figures.counts(here).cpu()

    def _figures(self, name: str) -> tuple[Statistic, ...]:
        """Return what is wanted of a module, or of a parameter by its own name or its module's."""
        names = (name, name.rpartition(".")[0])
        pairs = self._config.statistics if self._config else ()
        return next((wanted for glob, wanted in pairs if any(fnmatchcase(each, glob) for each in names)), ())

    def _named(self) -> dict[str, str]:
        return {name: _type(module) for name, module in self._modules.items()}

    def _watches(self, name: str, module: nn.Module) -> bool:
        """Say whether a module is one of the undivided model's, and is here."""
        return bool(name) and "parametrizations" not in name and next(module.parameters(), None) is not None


def _type(module: nn.Module) -> str:
    """Return a module's class, without what dividing it has made of that."""
    name = type(module).__name__
    return name.removeprefix("FSDP").removeprefix("Parametrized")
