"""Runs of custom training scripts: five lines make a script resume after any failure, and two lines log its metrics.

    with swarmtrain.trainer.run(trainer={"save_dir": "checkpoints"}) as run:
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        for batch in run.steps(loader, epochs=10):
            ...
            run.log(loss=loss, tokens=run.sum(tokens))
            run.save_if_due()
            if run.stop_requested:
                run.save_and_exit()

Works under every launcher, under plain torchrun, srun or mpirun, and in one process. run.log() also works without the other lines.

user_state        state to save: any object with a state_dict()
data_sharding     shard the samples of a DataLoader over any number of ranks
state_tree        split a state_dict() into tensors and JSON
prefetch          read data that cannot be sharded one batch ahead
training_loop     the steps of a run: resume, save and exit
finite_checks     end the run if its loss or its parameters are not finite
callbacks         functions called after a step, after a save, and at the end of the run
lr_warmup         learning rate schedules for larger batches
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from pydantic import ValidationError

from swarmtrain import protocol
from swarmtrain.config import Config
from swarmtrain.config.validation_errors import convert_validation_error
from swarmtrain.errors import ConfigError, TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import SavedCheckpoint
from swarmtrain.trainer.custom.callbacks import CallbackEvent, CallbackRegistry
from swarmtrain.trainer.custom.finite_checks import LossCheck
from swarmtrain.trainer.custom.lr_warmup import build_linear_scaling_warmup
from swarmtrain.trainer.custom.training_loop import TrainingLoop
from swarmtrain.trainer.custom.user_state import Stateful, UserState
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.metrics.event_sender import EventSender
from swarmtrain.trainer.metrics.reduction import (
    MetricValue,
    MetricValues,
    ReductionOp,
    decode_metrics,
    encode_metrics,
    flatten_metric_results,
    reduce_metrics,
)
from swarmtrain.trainer.metrics.sinks import Sinks, get_metrics_folder
from swarmtrain.trainer.metrics.sinks.jsonl import read_last_metrics_step
from swarmtrain.trainer.object_factory import instantiate
from swarmtrain.trainer.runtime import Runtime, read_config, start_runtime

__all__ = ["Run", "build_linear_scaling_warmup", "instantiate", "run"]

LOG = logging.getLogger("swarmtrain")
_FLUSH_TIMEOUT_SECONDS = 10.0


@contextmanager
def run(
    config: Config | Path | str | None = None, *, trainer: Mapping[str, Any] | None = None, logger: Mapping[str, Any] | None = None
) -> Iterator[Run]:
    """Context manager for a custom script: start the runtime, and yield the Run.

    When the body has completed, all metrics are written and the registered objects are saved. `config`: a config, or the path of a config
    file; used if the launcher provides no config. Without any config, defaults apply. `trainer` and `logger` override fields of these
    config sections: `run(logger={"log_dir": "logs", "use_csv": True})`. A process group that the script has already initialized is reused.

    Raises ConfigError if the config is invalid, TrainingError if the process group cannot be initialized.
    """
    with ExitStack() as stack:
        already_initialized = dist.is_initialized()
        runtime = stack.enter_context(start_runtime(_load_config(config, {"trainer": trainer or {}, "logger": logger or {}})))
        # The script's own process group may be for GPUs only (NCCL). The Run exchanges small values on the CPU, through Gloo.
        current_run = Run(runtime, dist.new_group(backend="gloo") if already_initialized else None, stack)
        with current_run.callbacks:
            try:
                yield current_run
                current_run._finish_run()
            except SystemExit as exit_request:
                current_run._close_run(all_ranks_present=exit_request.code in (None, 0, protocol.EXIT_PLANNED))
                raise
            except BaseException:
                current_run._close_run(all_ranks_present=runtime.world_size == 1)  # other ranks may not reach it: a collective would hang
                raise
            current_run._close_run(all_ranks_present=True)


class Run:
    """The run of a custom script on one rank: its rank and device, metrics, and checkpoints."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup | None, exit_stack: ExitStack) -> None:
        """Read the step of the last logged metrics, so that step numbers continue after a restart. Collective: all ranks must call it.

        `group`: process group of all ranks; None: the default group. `exit_stack`: exit stack that is closed at the end of the run.
        """
        self.runtime = runtime
        self._group, self._stack = group, exit_stack
        folder = get_metrics_folder(runtime)
        self._step = collectives.run_on_all_ranks(lambda: read_last_metrics_step(folder) if folder and runtime.is_rank_zero else 0, group)[
            0
        ]
        self._installed_stop_flag: StopFlag | None = None
        self._pending_metrics: dict[int, MetricValues] = {}
        self._resumed_step: int | None = None
        """Step from which the run resumes: logged metrics of later steps are dropped. None until a step is logged."""
        self._step_was_set = False
        """Whether the script has set `step`."""
        self._sinks = Sinks()
        self._is_open = False
        self._event_sender = EventSender(runtime.coordinator_address) if runtime.is_rank_zero and runtime.coordinator_address else None
        self._loop: TrainingLoop | None = None
        self._loss_check = LossCheck(runtime.config.trainer)
        self.callbacks = CallbackRegistry()

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.runtime.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.runtime.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self.runtime.local_rank

    @property
    def device(self) -> torch.device:
        """Device of this rank: its GPU, or the CPU."""
        return self.runtime.device

    @property
    def step(self) -> int:
        """Number of the current step in the loop over steps().

        Without such a loop: the last logged step, including steps logged before a restart; 0 if no step is logged.

        A script that loads checkpoints without register_for_checkpointing() must set this property to the step of the loaded checkpoint,
        before its first log(). Logged metrics of later steps are dropped.
        """
        return self._loop.progress.step if self._loop else self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._step_was_set = step, True

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested on any rank (SIGTERM). Read this property on all ranks together, once per step.

        After the first read, SIGTERM no longer kills the process: the script must save its state, and call sys.exit(75) to be restarted.
        """
        stop = self._install_stop_signal_handler()
        return self._loop.stop_requested if self._loop else collectives.all_reduce_sum([stop.is_set], self._group)[0] > 0

    @property
    def epoch(self) -> int:
        """Index of the current epoch: the number of times that the data of steps() has been read completely."""
        return self._loop.epoch if self._loop else 0

    @property
    def loss_weight(self) -> float:
        """Factor for the loss of this rank's batch.

        It is 1 if all ranks have equal numbers of samples, and 0 if this rank has no data left and repeats a batch only to take part in
        the step. If the loss is a mean over this rank's samples, multiply it by this weight: the mean over ranks, which
        DistributedDataParallel computes, is then the mean over all samples.
        """
        return self._loop.loss_weight if self._loop else 1.0

    def register_for_checkpointing(self, **objects: Stateful) -> None:
        """Register objects to save in checkpoints, and load the newest checkpoint, if any, into them.

        Call it on all ranks, once, before the loop. Each object has a state_dict() that is the same on all ranks, and a
        load_state_dict(): a model (also in DistributedDataParallel), an optimizer, a schedule, or a custom object. Changes of
        config, arguments and script since the loaded checkpoint are logged.

        Raises TrainingError if trainer.save_dir is not set or an object cannot be saved, IncompatibleCheckpoint if the newest checkpoint
        was saved from other objects.
        """
        if self._loop:
            raise TrainingError(
                "was called a second time",
                place="register_for_checkpointing",
                hint="pass all objects to save in one call",
            )
        if self.runtime.config.trainer.save_dir is None:
            hint = 'call run(trainer={"save_dir": "checkpoints"}), or set trainer.save_dir in the config'
            raise TrainingError("is not set, so no state can be saved", place="config trainer.save_dir", hint=hint)
        self._loop = loop = TrainingLoop(
            self.runtime, self._group, UserState(objects), self._install_stop_signal_handler(), self._report_warning
        )
        self.step = loop.progress.step
        if loop.resumed_from:
            self._report_event(
                f"resuming from step {self.step}, from {loop.resumed_from[0]}",
                protocol.EVENT_RESUMED,
                step=self.step,
                path=str(loop.resumed_from[0]),
                run_id=loop.run_id,
            )

    def steps(
        self, data: Iterable[Any], *, epochs: int | None = None, max_steps: int | None = None, global_batch_size: int | None = None
    ) -> Iterator[Any]:
        """Yield the remaining batches of `data`, from the step at which the newest checkpoint resumes. Call it on all ranks.

        If `data` is a DataLoader, its samples are sharded over the ranks at each step, in an order that does not depend on the number of
        ranks. `global_batch_size`: samples per step on all ranks together; by default the loader's batch_size times the number of ranks at
        the run's first start.

        Any other iterable is read completely on each rank, and batches that were processed before a restart are skipped. If ranks have
        unequal numbers of batches, a rank without a next batch repeats its last batch, with a `loss_weight` of 0, until no rank has a next
        batch (compare the context manager torch.distributed.algorithms.Join).

        The loop ends after `max_steps` steps in total; if `max_steps` is None, after `epochs` epochs (default 1). Both are counted across
        restarts. Random number generators are seeded at each step. The last step is saved.

        Raises TrainingError if register_for_checkpointing() was not called, or if the loop does not call save_if_due() or read
        stop_requested.
        """
        if self._loop is None:
            hint = (
                "call run.register_for_checkpointing(model=model, optimizer=optimizer) before the loop; without it a restart "
                "starts from scratch"
            )
            raise TrainingError("no state is registered for checkpointing", place="steps", hint=hint)
        for local_batch in self._loop.iterate_steps(data, epochs, max_steps, global_batch_size):
            yield local_batch
            self.callbacks.run_callbacks(CallbackEvent.step, self._loop.progress.step)
        self._report_saved_checkpoints(self._loop.save_and_wait())

    def save_if_due(self, *, metric: float | None = None) -> None:
        """Save this step if a checkpoint is due by trainer.save_interval. Call it at the end of each step.

        `metric`: validation loss of this step, if it was evaluated; with trainer.best_checkpoint_mode max, an accuracy or another metric
        for which higher is better. It must be equal on all ranks. trainer.keep_best_checkpoints is the number of checkpoints with the best
        metric to keep.

        Raises WorldError if a newer world (restart) has taken over; TrainingError outside the loop over steps(), or if a trained
        parameter of a registered module contains NaN or Inf.
        """
        if self._loop is None:
            raise TrainingError(
                "no state is registered for checkpointing",
                place="save_if_due",
                hint="call run.register_for_checkpointing(model=model, optimizer=optimizer) before the loop",
            )
        self._report_saved_checkpoints(self._loop.save_if_due(metric))

    def save_and_exit(self) -> NoReturn:
        """Save this step, and raise SystemExit with the exit code of a graceful exit, so that the run is restarted and resumes.

        Raises CheckpointError if the step cannot be saved, WorldError if a newer world (restart) has taken over.
        """
        if self._loop:
            self._report_saved_checkpoints(self._loop.save_and_wait())
        LOG.info("stop requested: exiting after step %d", self._step)
        raise SystemExit(protocol.EXIT_PLANNED)

    def add_callback(self, event: CallbackEvent | str, function: Callable[..., object], *, priority: int = 0) -> None:
        """Register `function` to be called at an `event`: "step", "saved" or "end".

        The arguments of `function` are the step at "step", the step and the checkpoint's path at "saved", and none at "end". Functions
        with a higher `priority` are called first. An error that a function raises ends the run; at "end", all other functions are still
        called.
        """
        self.callbacks.add_callback(CallbackEvent(event), function, priority)

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Log the metrics `values` of `step`. Call it on all ranks, once per step.

        `step`: by default the current step of the loop over steps(); without such a loop, the step after the last logged step. A value is
        a number, a tensor with one element (which stays on its device until metrics are written), or an object with a `compute()` method,
        such as a torchmetrics metric. The mean over ranks is logged; for another reduction, pass run.sum(value), or use run.min, run.max,
        run.last or run.cat. Ranks communicate once every logger.log_interval steps.

        Raises TrainingError if a value is not a number, if a configured sink cannot be opened, or if the metric `loss` is not finite and
        trainer.non_finite ends the run for that.
        """
        current_step = self._loop.progress.step if self._loop else 0
        number = (current_step or self._step + 1) if step is None else step
        if self._resumed_step is None:
            self._resumed_step = self._step = self._step if self._step_was_set or number > self._step else number - 1
        self._pending_metrics.setdefault(number, {}).update(
            each for name, value in values.items() for each in flatten_metric_results(name, value)
        )
        self._step = max(self._step, number)
        if len(self._pending_metrics) >= self.runtime.config.logger.log_interval:
            self._write_pending_metrics()

    def sum(self, value: Any) -> MetricValue:
        """Return `value`, to be logged as the sum over ranks."""
        return MetricValue(value, ReductionOp.sum)

    def min(self, value: Any) -> MetricValue:
        """Return `value`, to be logged as the minimum over ranks."""
        return MetricValue(value, ReductionOp.min)

    def max(self, value: Any) -> MetricValue:
        """Return `value`, to be logged as the maximum over ranks."""
        return MetricValue(value, ReductionOp.max)

    def last(self, value: Any) -> MetricValue:
        """Return `value`, to be logged without reduction: the value of the highest rank that has logged this metric."""
        return MetricValue(value, ReductionOp.last)

    def cat(self, value: Any) -> MetricValue:
        """Return `value`, a number or a sequence of numbers, to be logged as the list of all ranks' values."""
        return MetricValue(value, ReductionOp.cat)

    def _write_pending_metrics(self) -> None:
        """Reduce the pending metrics over all ranks and write them to the sinks. Collective: all ranks must call it."""
        local_metrics = {step: encode_metrics(values) for step, values in self._pending_metrics.items()}
        self._pending_metrics.clear()
        metrics_by_rank = [
            {step: decode_metrics(values) for step, values in rank_metrics.items()}
            for rank_metrics in collectives.all_gather_values(local_metrics, self._group)
        ]
        if not self._is_open and self._resumed_step is not None:
            resumed_step = self._resumed_step
            collectives.run_on_all_ranks(lambda: self._sinks.open(self.runtime, resumed_step), self._group)
            self._is_open = True
        lines = []
        for step in sorted({step for rank_metrics in metrics_by_rank for step in rank_metrics}):
            lines.append({"step": step, **reduce_metrics([rank_metrics.get(step, {}) for rank_metrics in metrics_by_rank])})
            self._sinks.write_metrics(lines[-1])
        if lines:
            LOG.info("%s", _format_metrics_line(lines[-1]))
            self._post_progress(lines[-1])
        for line in lines:
            self._loss_check.check_metrics(line)

    def _post_progress(self, metrics_line: Mapping[str, Any]) -> None:
        if self._event_sender:
            numbers = {name: value for name, value in metrics_line.items() if isinstance(value, int | float)}
            self._event_sender.queue_progress_event(protocol.Event(protocol.EVENT_PROGRESS, numbers))

    def _install_stop_signal_handler(self) -> StopFlag:
        if self._installed_stop_flag is None:
            self._installed_stop_flag = self._stack.enter_context(StopFlag())
        return self._installed_stop_flag

    def _finish_run(self) -> None:
        """Save the last step, and report the end of the run. Called when the body of the context manager has completed without an error."""
        if loop := self._loop:
            self._write_pending_metrics()  # a loss that is not finite ends the run before it counts as finished
            self._report_saved_checkpoints(loop.save_and_wait())
            if loop.is_done:
                self._report_event(f"finished at step {loop.progress.step}", protocol.EVENT_TRAINING_FINISHED, step=loop.progress.step)

    def _report_saved_checkpoints(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        for checkpoint in checkpoints:
            message = f"saved {checkpoint.path} in {checkpoint.save_seconds:.2f} s (training stalled for {checkpoint.stall_seconds:.2f} s)"
            self._report_event(
                message,
                protocol.EVENT_CHECKPOINT,
                step=checkpoint.step,
                path=str(checkpoint.path),
                seconds=round(checkpoint.save_seconds, 3),
            )
            self.callbacks.run_callbacks(CallbackEvent.saved, checkpoint.step, checkpoint.path)

    def _report_warning(self, message: str) -> None:
        if self.runtime.is_rank_zero:
            LOG.warning("%s", message)
            if self._event_sender:
                self._event_sender.queue_event(protocol.Event(protocol.EVENT_NOTE, {"node": self.runtime.node, "message": message}))

    def _report_event(self, message: str, kind: str, **data: Any) -> None:
        """Log an event and post it to the coordinator, on rank 0."""
        if self.runtime.is_rank_zero:
            LOG.info("%s", message)
            if self._event_sender:
                self._event_sender.queue_event(protocol.Event(kind, data))

    def _close_run(self, *, all_ranks_present: bool) -> None:
        try:
            if all_ranks_present:
                self._write_pending_metrics()
        finally:
            self._sinks.close()
            if self._event_sender:
                self._event_sender.close(_FLUSH_TIMEOUT_SECONDS)


def _format_metrics_line(line: Mapping[str, Any]) -> str:
    fields = (f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items())
    return "  ".join(fields)


def _load_config(config_or_path: Config | Path | str | None, overrides: Mapping[str, Mapping[str, Any]]) -> Config:
    if isinstance(config_or_path, Config):
        config = config_or_path
    elif config_or_path is not None or "SWARMTRAIN_CONFIG" in os.environ:
        config = read_config([] if config_or_path is None else [str(config_or_path)])
    else:
        config = Config()
    values = json.loads(config.to_json())
    for section, fields in overrides.items():
        values[section] |= fields
    try:
        return Config.from_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ConfigError(tuple(convert_validation_error(error, Config, {}))) from None
