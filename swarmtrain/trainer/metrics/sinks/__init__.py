"""Metric sinks: metrics.jsonl, metrics.csv, TensorBoard, W&B, a Determined trial and sinks of other packages, in any combination.

A sink receives metrics lines: mappings of metric names to numbers, with the step under `step`. A line may also have samples that were
generated from prompts (see metrics_lines.py).

Each world opens its sinks again, and no step appears twice in a sink: lines of steps after the resumed step, which an earlier world has
written, are discarded, and the lines of the resumed step are written again from metrics.jsonl. So all sinks receive the same values, even
if the earlier world ended after it had written them to only one sink.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from swarmtrain.config.entry_points import METRICS_SINK_GROUP, list_entry_points, load_entry_point
from swarmtrain.config.schema.logger import LoggerConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.sinks.csv_table import CsvTable
from swarmtrain.trainer.metrics.sinks.jsonl import MetricsFile
from swarmtrain.trainer.metrics.sinks.metrics_lines import ResumeHistory
from swarmtrain.trainer.metrics.sinks.tensorboard import EventFile
from swarmtrain.trainer.metrics.sinks.wandb_run import WandbRun
from swarmtrain.trainer.runtime import Runtime


class Sink(Protocol):
    """Interface of a metric sink. An open sink raises no errors: a failure of its destination never stops training."""

    def write_metrics(self, metrics_line: dict[str, Any]) -> None:
        """Write `metrics_line`, which has the key `step`. The value None represents NaN/Inf."""

    def close(self) -> None:
        """Write pending metrics, for at most 30 s, and close the sink."""


SinkFactory = Callable[[Runtime, Path, ResumeHistory], Sink]
_BUILT_IN_SINKS: dict[str, SinkFactory] = {"csv": CsvTable, "tensorboard": EventFile, "wandb": WandbRun}
"""Built-in sink classes, by their name in logger.sinks."""


class Sinks:
    """All sinks of a run, used as one sink. Ranks other than rank 0 have no sinks."""

    def __init__(self, *open_sinks: Sink) -> None:
        """`open_sinks`: sinks that are already open."""
        self._sinks: list[Sink] = [*open_sinks]
        self._history = ResumeHistory(0, ())

    def open(self, runtime: Runtime, resumed_step: int) -> None:
        """Open the sinks that the config selects, for a run that resumes from `resumed_step`.

        Raises TrainingError if a sink cannot be opened.
        """
        if not runtime.is_rank_zero:
            return
        folder = get_metrics_folder(runtime)
        if folder:
            metrics_file = MetricsFile(folder, resumed_step)
            self._sinks.append(metrics_file)
            self._history = metrics_file.history
        for create_sink in _list_configured_sinks(runtime.config.logger):
            sink = create_sink(runtime, folder or Path.cwd(), self._history)
            self._sinks.append(sink)

    def write_metrics(self, metrics_line: dict[str, Any]) -> None:
        """Write `metrics_line` to each sink. Metrics of the resumed step that are already in the history are omitted."""
        if metrics_line["step"] == self._history.step:
            metrics_line = {
                name: value for name, value in metrics_line.items() if name == "step" or name not in self._history.last_step_metric_names
            }
        if len(metrics_line) > 1:
            for sink in self._sinks:
                sink.write_metrics(metrics_line)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()


def get_metrics_folder(runtime: Runtime) -> Path | None:
    """Return the folder of the run's metrics files: logger.log_dir, else trainer.save_dir; None if neither is set."""
    return runtime.config.logger.log_dir or runtime.config.trainer.save_dir


def _list_configured_sinks(logger_config: LoggerConfig) -> list[SinkFactory]:
    """Return the class of each sink that the config selects. Raises SwarmtrainError if a class is missing or cannot be imported."""
    is_selected_by_key = {"csv": logger_config.use_csv, "tensorboard": logger_config.use_tensorboard, "wandb": logger_config.use_wandb}
    names = [name for name, is_selected in is_selected_by_key.items() if is_selected] + [*logger_config.sinks]
    return [_BUILT_IN_SINKS.get(name) or _load_installed_sink(name) for name in dict.fromkeys(names)]


def _load_installed_sink(name: str) -> SinkFactory:
    """Import the sink class that another package registers as entry point `name`, and return it.

    Raises SwarmtrainError if there is no such entry point, or if it cannot be imported.
    """
    installed = list_entry_points(METRICS_SINK_GROUP)
    if name not in installed:
        message = f"unknown sink {name}; existing sinks: {', '.join([*_BUILT_IN_SINKS, *installed])}"
        raise TrainingError(message, place="config logger.sinks", hint="install the sink's package, also in the image")
    sink_class: SinkFactory = load_entry_point(installed[name])
    return sink_class
