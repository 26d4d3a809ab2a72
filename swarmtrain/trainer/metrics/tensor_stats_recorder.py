"""Recorder of statistics of weights, activations and gradients, every N steps.

It writes one JSON line per tensor and recorded step to `tensor-statistics.jsonl`. The statistics of weights and their gradients are those
of full tensors: each shard is counted on only one of the ranks that hold it. The statistics of an activation cover all micro batches of
the step on all ranks. If tensor-parallel ranks hold the same activation, it is counted once per rank.

The recorder modifies no tensors, and does nothing between recorded steps.
"""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmtrain.config.schema.tensor_statistics import Statistic, TensorKind
from swarmtrain.trainer import collectives
from swarmtrain.trainer.metrics import tensor_stats
from swarmtrain.trainer.metrics.sinks.jsonl import MetricsFile
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.working_weights import get_working_dtype
from swarmtrain.trainer.runtime import Runtime

TensorKey = tuple[TensorKind, str]


class TensorStatsRecorder:
    """Records statistics of the tensors of a model on this rank. A no-op if the config does not enable it."""

    def __init__(self, runtime: Runtime, model: ParallelModel, resumed_step: int) -> None:
        """Create the recorder for a run that resumes from `resumed_step`. Collective: all ranks must call it.

        Raises TrainingError if the file cannot be created.
        """
        self._config = config = runtime.config.trainer.tensor_statistics_recorder_config
        if config is None:
            return
        self._model, self._is_first_replica = model, model.mesh.device_mesh.get_local_rank("replica") == 0
        self._compute_dtype = get_working_dtype(runtime.config.transformer_architecture.precision) or torch.float32
        self._file = MetricsFile(runtime.output_folder, resumed_step, "tensor-statistics.jsonl") if runtime.is_rank_zero else None
        self._modules = {name: module for name, module in model.local_model.named_modules() if self._is_recorded_module(name, module)}
        self._statistics_by_key: dict[TensorKey, tuple[Statistic, ...]] = {}
        self._module_types = {
            name: kind for rank_types in collectives.all_gather_values(self._list_module_types()) for name, kind in rank_types.items()
        }
        for kind in config.kinds:
            for name in (
                self._module_types
                if "activation" in kind
                else model.trained_names
                if kind is TensorKind.gradients
                else model.parameter_names
            ):
                if statistics := self._find_configured_statistics(name):
                    self._statistics_by_key[kind, name] = statistics
        self._recorded_step: int | None = None
        self._hooks: list[Any] = []

    def start_recording_if_due(self, step: int) -> None:
        """If `step` is a recorded step, record the weights, and register hooks that record the outputs of modules."""
        if self._config is None or step % self._config.interval:
            return
        self._recorded_step = step
        self._columns_by_key: dict[TensorKey, Tensor] = {}
        self._histograms: dict[TensorKey, Tensor] = defaultdict(lambda: torch.zeros(tensor_stats.BIN_COUNT, dtype=torch.int64))
        for name, parameter in self._model.parameters.items():
            self._accumulate_primary_shard(TensorKind.weights, name, parameter)
        if any("activation" in kind for kind in self._config.kinds):
            for name, module in self._modules.items():
                self._hooks.append(module.register_forward_hook(partial(self._record_activation, name)))

    def record_gradients(self) -> None:
        """Record the gradients, and write the statistics of the step.

        Called by all ranks together, after gradients are reduced and before they are clipped.
        """
        if self._config is None or self._recorded_step is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name, parameter in self._model.parameters.items():
            if parameter.grad is not None:
                self._accumulate_primary_shard(TensorKind.gradients, name, parameter.grad)
        columns = torch.stack(
            [self._columns_by_key.get(key, tensor_stats.create_empty_partial_statistics()).cpu() for key in self._statistics_by_key]
        )
        columns_by_rank = [torch.empty_like(columns) for _ in range(dist.get_world_size())] if self._file else None
        dist.gather(columns, columns_by_rank)
        rows = reduce(tensor_stats.merge_partial_statistics, columns_by_rank) if columns_by_rank else columns
        for row, (key, statistics) in zip(rows, self._statistics_by_key.items(), strict=True):
            histogram = None
            if tensor_stats.needs_histogram(statistics):
                histogram = self._histograms[key].cpu()
                dist.reduce(histogram, 0)
            if self._file and row[tensor_stats.COUNT]:
                self._file.write_metrics(self._build_statistics_line(key, row, tensor_stats.compute_statistics(row, statistics, histogram)))
        self._recorded_step = None

    def close(self) -> None:
        """Close the file."""
        if self._config and self._file:
            self._file.close()

    def _build_statistics_line(self, tensor_key: TensorKey, partial_statistics: Tensor, statistics: dict[str, Any]) -> dict[str, Any]:
        kind, name = tensor_key
        line: dict[str, Any] = {"step": self._recorded_step, "name": name, "kind": str(kind)}
        if self._config and self._config.include_module_type:
            line["type"] = self._module_types[name if name in self._module_types else name.rpartition(".")[0]]
        return {**line, "count": int(partial_statistics[tensor_stats.COUNT]), **statistics}

    def _record_activation(self, module_name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Forward hook that records the output of a module.

        A no-op in the backward pass, where activation checkpointing recomputes outputs that are already recorded.
        """
        if not isinstance(output, Tensor) or not output.is_floating_point() or torch._C._current_graph_task_id() != -1:
            return
        self._accumulate_tensor_statistics(TensorKind.activations, module_name, output)
        if output.requires_grad and (TensorKind.activation_gradients, module_name) in self._statistics_by_key:
            output.register_hook(partial(self._record_activation_gradient, module_name))  # type: ignore[no-untyped-call]  # not typed in torch

    def _record_activation_gradient(self, module_name: str, gradient: Tensor) -> None:
        self._accumulate_tensor_statistics(TensorKind.activation_gradients, module_name, gradient)

    def _accumulate_primary_shard(self, tensor_kind: TensorKind, parameter_name: str, tensor: Tensor) -> None:
        if self._is_first_replica and self._model.shard_layout.is_primary_copy(parameter_name):
            self._accumulate_tensor_statistics(tensor_kind, parameter_name, tensor)

    @torch.no_grad()
    def _accumulate_tensor_statistics(self, tensor_kind: TensorKind, tensor_name: str, tensor: Tensor) -> None:
        key = tensor_kind, tensor_name
        if key not in self._statistics_by_key:
            return
        row = tensor_stats.compute_partial_statistics(tensor, self._compute_dtype)
        self._columns_by_key[key] = (
            tensor_stats.merge_partial_statistics(self._columns_by_key[key], row) if key in self._columns_by_key else row
        )
        if tensor_stats.needs_histogram(self._statistics_by_key[key]):
            self._histograms[key] += tensor_stats.compute_histogram(tensor).cpu()

    def _find_configured_statistics(self, tensor_name: str) -> tuple[Statistic, ...]:
        """Return the statistics configured for the module or parameter `tensor_name`; empty if no pattern matches.

        The configured patterns match a parameter by its own name or by the name of its module.
        """
        names = (tensor_name, tensor_name.rpartition(".")[0])
        pairs = self._config.statistics if self._config else ()
        return next((statistics for pattern, statistics in pairs if any(fnmatchcase(each, pattern) for each in names)), ())

    def _list_module_types(self) -> dict[str, str]:
        return {name: _get_module_type(module) for name, module in self._modules.items()}

    def _is_recorded_module(self, name: str, module: nn.Module) -> bool:
        """Return whether `module` also exists in the unsharded model, and has parameters on this rank."""
        return bool(name) and "parametrizations" not in name and next(module.parameters(), None) is not None


def _get_module_type(module: nn.Module) -> str:
    """Return the class name of `module`, without the prefixes that sharding and parametrization add."""
    name = type(module).__name__
    return name.removeprefix("FSDP").removeprefix("Parametrized").removeprefix("VocabularyParallel")
