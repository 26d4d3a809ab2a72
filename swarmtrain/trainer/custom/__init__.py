"""Runs: the public interface of training scripts, for swarmtrain's models (training_code.py) and for any other.

Five lines make a custom script resume after any failure, and two lines log its metrics:

    with swarmtrain.trainer.run(trainer={"save_dir": "checkpoints"}) as run:
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        for batch in run.steps(loader, epochs=10):
            ...
            run.log(loss=loss, tokens=run.sum(tokens))
            run.save_if_due()
            if run.stop_requested:
                run.save_and_exit()

Works under every launcher, under plain torchrun, srun or mpirun, and in one process. run.log() also works without the other lines.

user_state        state to save: any object with a state_dict(), which is split into tensors and JSON
data_sharding     shard the samples of a DataLoader over any number of ranks; read data that cannot be sharded one batch ahead
training_loop     what the two loops have in common: progress, checkpoints when they are due, stop of all ranks
script_loop       steps on any data, for the objects that a custom script registers
model_loop        steps of a parallel model on token files
finite_checks     end the run if its loss or its parameters are not finite
callbacks         functions called after a step, after a save, and at the end of the run
lr_warmup         learning rate schedules for larger batches
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
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
from swarmtrain.trainer.checkpoint import Progress, SavedCheckpoint
from swarmtrain.trainer.custom.callbacks import CallbackEvent, CallbackRegistry
from swarmtrain.trainer.custom.finite_checks import LossCheck
from swarmtrain.trainer.custom.lr_warmup import build_linear_scaling_warmup
from swarmtrain.trainer.custom.model_loop import ModelLoop
from swarmtrain.trainer.custom.script_loop import ScriptLoop
from swarmtrain.trainer.custom.training_loop import TrainingLoop
from swarmtrain.trainer.custom.user_state import Stateful, UserState
from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.metrics import RunReporter
from swarmtrain.trainer.metrics.reduction import (
    MetricValue,
    MetricValues,
    ReductionOp,
    decode_metrics,
    encode_metrics,
    flatten_metric_results,
    reduce_metrics,
)
from swarmtrain.trainer.metrics.sinks import get_metrics_folder
from swarmtrain.trainer.metrics.sinks.determined_trial import DeterminedTrial
from swarmtrain.trainer.metrics.sinks.jsonl import read_last_metrics_step
from swarmtrain.trainer.object_factory import instantiate
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime, read_config, start_runtime
from swarmtrain.trainer.step import StepResult, ValidationResult

__all__ = ["Run", "TrainingResult", "build_linear_scaling_warmup", "instantiate", "run", "start_run"]

LOG = logging.getLogger("swarmtrain")
_REGISTER_HINT = "call run.register_for_checkpointing(model=model, optimizer=optimizer) before the loop"


@contextmanager
def run(
    config: Config | Path | str | None = None,
    *,
    trainer: Mapping[str, Any] | None = None,
    logger: Mapping[str, Any] | None = None,
    monitors_peers: bool = False,
) -> Iterator[Run]:
    """Context manager for a training script: start the runtime, and yield the Run.

    When the body has completed, all metrics are written and the registered objects are saved. `config`: a config, or the path of a config
    file; used if the launcher provides no config. Without any config, defaults apply. `trainer` and `logger` override fields of these
    config sections: `run(logger={"log_dir": "logs", "use_csv": True})`. A process group that the script has already initialized is reused.
    `monitors_peers`: see start_runtime.

    Raises ConfigError if the config is invalid, TrainingError if the process group cannot be initialized.
    """
    overridden = _load_config(config, {"trainer": trainer or {}, "logger": logger or {}})
    already_initialized = dist.is_initialized()
    with (
        start_runtime(overridden, monitors_peers=monitors_peers) as runtime,
        # The script's own process group may be for GPUs only (NCCL). The Run exchanges small values on the CPU, through Gloo.
        start_run(runtime, dist.new_group(backend="gloo") if already_initialized else None) as current_run,
    ):
        yield current_run


@contextmanager
def start_run(runtime: Runtime, group: dist.ProcessGroup | None = None) -> Iterator[Run]:
    """Context manager: yield the Run of a runtime that is already started. `group`: process group of all ranks; None: the default group."""
    with ExitStack() as stack:
        current_run = Run(runtime, group, stack)
        with current_run.callbacks:
            try:
                with current_run.training_stack:
                    yield current_run
                    current_run.finish()
            except SystemExit as exit_request:
                current_run._close_run(all_ranks_present=exit_request.code in (None, 0, protocol.EXIT_PLANNED))
                raise
            except BaseException:
                current_run._close_run(all_ranks_present=runtime.world_size == 1)  # other ranks may not reach it: a collective would hang
                raise
            current_run._close_run(all_ranks_present=True)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished run: its last step, and validation losses in nats per `loss_unit` (None without validation data)."""

    step: int
    initial_validation_loss: float | None
    final_validation_loss: float | None
    loss_unit: str
    """What the loss is a mean over: "token"; "byte", if each token is a byte; or the unit of another objective, such as "pair"."""


class Run:
    """The run of a training script on one rank: its rank and device, steps, metrics, and checkpoints."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup | None, exit_stack: ExitStack) -> None:
        """Read the step of the last logged metrics, so that step numbers continue after a restart. Collective: all ranks must call it.

        `group`: process group of all ranks; None: the default group. `exit_stack`: exit stack that is closed at the end of the run.
        """
        self.runtime = runtime
        self._group, self._stack = group, exit_stack
        self.training_stack = ExitStack()
        """Closed before the run ends, also with an error: what must notice at once that training fails."""
        folder = get_metrics_folder(runtime)
        self._step = 0
        self._unreadable_metrics: TrainingError | None = None
        """Raised when the last logged step is needed, if it cannot be read."""
        try:
            self._step = collectives.run_on_all_ranks(
                lambda: read_last_metrics_step(folder) if folder and runtime.is_rank_zero else 0, group
            )[0]
        except TrainingError as error:
            self._unreadable_metrics = error
        self._installed_stop_flag: StopFlag | None = None
        self._pending_metrics: dict[int, MetricValues] = {}
        self._resumed_step: int | None = None
        """Step from which the run resumes: logged metrics of later steps are dropped. None until a step is logged."""
        self._step_was_set = False
        """Whether the script has set `step`."""
        self._is_open = False
        self._trial = DeterminedTrial(runtime)
        self._reporter = RunReporter(runtime, self._trial)
        self._loop: TrainingLoop | None = None
        self._loss_check: LossCheck | None = None
        self._is_finished = False
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
        if self._loop:
            return self._loop.progress.step
        self._check_metrics_are_readable()
        return self._step

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
        return self._loop.epoch if isinstance(self._loop, ScriptLoop) else 0

    @property
    def loss_weight(self) -> float:
        """Factor for the loss of this rank's batch.

        It is 1 if all ranks have equal numbers of samples, and 0 if this rank has no data left and repeats a batch only to take part in
        the step. If the loss is a mean over this rank's samples, multiply it by this weight: the mean over ranks, which
        DistributedDataParallel computes, is then the mean over all samples.
        """
        return self._loop.loss_weight if isinstance(self._loop, ScriptLoop) else 1.0

    def register_for_checkpointing(self, **objects: Stateful) -> None:
        """Register objects to save in checkpoints, and load the newest checkpoint, if any, into them.

        Call it on all ranks, once, before the loop. Each object has a state_dict() that is the same on all ranks, and a
        load_state_dict(): a model (also in DistributedDataParallel), an optimizer, a schedule, or a custom object. Changes of
        config, arguments and script since the loaded checkpoint are logged.

        Raises TrainingError if trainer.save_dir is not set or an object cannot be saved, IncompatibleCheckpoint if the newest checkpoint
        was saved from other objects.
        """
        self._check_has_no_loop("register_for_checkpointing", "pass all objects to save in one call")
        if self.runtime.config.trainer.save_dir is None:
            hint = 'call run(trainer={"save_dir": "checkpoints"}), or set trainer.save_dir in the config'
            raise TrainingError("is not set, so no state can be saved", place="config trainer.save_dir", hint=hint)
        self._get_loss_check()
        self._loop = ScriptLoop(
            self.runtime, self._group, UserState(objects), stop_flag=self._install_stop_signal_handler(), reporter=self._reporter
        )
        self.step = self._loop.progress.step

    def prepare_training(
        self, model: ParallelModel, optimizer: Optimizer, data: TokenDataset, validation_data: TokenDataset | None = None
    ) -> None:
        """Load the newest checkpoint, if any, into a parallel model and its optimizer, and prepare to train it on `data`.

        Call it on all ranks, once, before the loop. Parameters without values get their initial values, unless a checkpoint has them. If a
        rank dies during training, the surviving ranks save the newest step for which they hold all shards. If a stop was requested on any
        rank, all ranks exit as in save_and_exit.

        Raises TrainingError if the data differs between ranks or does not match the model, CheckpointError if a checkpoint cannot be
        loaded.
        """
        self._check_has_no_loop("prepare_training", "prepare one model per run")
        self._loop = loop = ModelLoop(
            self.runtime,
            model,
            optimizer,
            data,
            validation_data,
            stop_flag=self._install_stop_signal_handler(),
            reporter=self._reporter,
            exit_stack=self.training_stack,
        )
        self._is_open, self._resumed_step, self.step = True, loop.progress.step, loop.progress.step
        if loop.any_rank_requests_stop:
            self.save_and_exit()

    def steps(
        self,
        data: Iterable[Any] | TokenDataset,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        global_batch_size: int | None = None,
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
            hint = f"{_REGISTER_HINT}; without it a restart starts from scratch"
            raise TrainingError("no state is registered for checkpointing", place="steps", hint=hint)
        loop = self._loop
        for local_batch in loop.iterate_steps(data, epochs, max_steps, global_batch_size):
            yield local_batch
            self.callbacks.run_callbacks(CallbackEvent.step, loop.progress.step)
        self._report_saved_checkpoints(loop.save_and_wait())

    def forward_backward(self, batch: GlobalBatch) -> Any:
        """Run the forward and backward passes of a batch of steps(), in every topology, and return the gradients for optimizer_step().

        The gradients are summed over all ranks, and clipped. Raises TrainingError if `batch` is not a batch of the config's size.
        """
        return self._get_model_loop("forward_backward").forward_backward(batch)

    def optimizer_step(self, gradients: Any) -> StepResult:
        """Update the parameters with the result of forward_backward(), and return the result of the step, which is equal on all ranks.

        A NaN/Inf loss or gradient changes no parameter. Raises TrainingError if trainer.non_finite ends the run in that case.
        """
        return self._get_model_loop("optimizer_step").optimizer_step(gradients)

    def log_step(self, result: StepResult, **metrics: float) -> None:
        """Log the result of optimizer_step(): loss, learning rate, gradient norm, speed, and the script's own `metrics`.

        Unlike those of log(), `metrics` are not reduced: those of rank 0 are logged.
        """
        self._get_model_loop("log_step").report_step(result, metrics)

    def check_ranks_if_due(self) -> None:
        """Compare the speed of all ranks, and the parameters of all replicas, if that is due. Raises TrainingError if replicas differ."""
        self._get_model_loop("check_ranks_if_due").check_ranks_if_due()

    def evaluate_if_due(self, validation_data: TokenDataset | None) -> ValidationResult | None:
        """Evaluate the model before the first step, every trainer.eval_interval steps, and after the last step. Return the result, if any.

        All ranks exit as in save_and_exit if a stop is requested meanwhile, except after the last step.
        """
        loop = self._get_model_loop("evaluate_if_due")
        if validation_data is None or not loop.is_evaluation_due:
            return None
        result = loop.evaluate(validation_data)
        if result is None:
            self.save_and_exit()
        return result

    def sample_if_due(self) -> None:
        """Log completions of the prompts in trainer.sampling_config, if they are due after this step."""
        self._get_model_loop("sample_if_due").sample_if_due()

    def save_if_due(self, *, metric: float | None = None) -> None:
        """Save this step if a checkpoint is due by trainer.save_interval. Call it at the end of each step.

        `metric`: validation loss of this step, if it was evaluated; with trainer.best_checkpoint_mode max, an accuracy or another metric
        for which higher is better. It must be equal on all ranks. trainer.keep_best_checkpoints is the number of checkpoints with the best
        metric to keep.

        Raises WorldError if a newer world (restart) has taken over; TrainingError outside the loop over steps(), or if a trained
        parameter of a registered module contains NaN or Inf.
        """
        if self._loop is None:
            raise TrainingError("no state is registered for checkpointing", place="save_if_due", hint=_REGISTER_HINT)
        self._report_saved_checkpoints(self._loop.save_if_due(metric))

    def save_and_exit(self) -> NoReturn:
        """Save this step, and raise SystemExit with the exit code of a graceful exit, so that the run is restarted and resumes.

        Raises CheckpointError if the step cannot be saved, WorldError if a newer world (restart) has taken over.
        """
        loop = self._loop
        if loop:
            self._report_saved_checkpoints(loop.save_and_wait())
        with loop.use_save_timeout() if loop else nullcontext():
            exit_code = self._reporter.report_graceful_exit(self.step)
        raise SystemExit(exit_code)

    def finish(self, **final_metrics: Any) -> TrainingResult:
        """Report the end of the run, with `final_metrics`, if its last step is complete, and return its result.

        Called at the end of the context manager, if the script has not called it. Saves the last step, if steps() has not.
        """
        loop = self._loop
        if loop is None:
            self._get_loss_check()
        elif not self._is_finished:
            self._write_pending_metrics()  # a loss that is not finite ends the run before it counts as finished
            self._report_saved_checkpoints(loop.save_and_wait())
            if loop.is_done:
                self._reporter.report_training_finished(loop.progress.step, loop.describe_result() | final_metrics)
        self._is_finished = True
        progress = loop.progress if loop else Progress(self._step)
        loss_unit = loop.loss_unit if isinstance(loop, ModelLoop) else ""
        return TrainingResult(progress.step, progress.initial_validation_loss, progress.validation_loss, loss_unit)

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
            self._check_metrics_are_readable()
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
            collectives.run_on_all_ranks(lambda: self._reporter.open_sinks(resumed_step), self._group)
            self._is_open = True
        steps = sorted({step for rank_metrics in metrics_by_rank for step in rank_metrics})
        lines = [{"step": step, **reduce_metrics([each.get(step, {}) for each in metrics_by_rank])} for step in steps]
        self._reporter.report_metrics(lines)
        if not isinstance(self._loop, ModelLoop):
            for line in lines:
                self._get_loss_check().check_metrics(line)

    def _install_stop_signal_handler(self) -> StopFlag:
        if self._installed_stop_flag is None:
            self._installed_stop_flag = self._stack.enter_context(StopFlag(self._trial.should_preempt))
        return self._installed_stop_flag

    def _check_metrics_are_readable(self) -> None:
        if self._unreadable_metrics:
            raise self._unreadable_metrics

    def _get_loss_check(self) -> LossCheck:
        """Return the check of the losses of a custom script. Raises TrainingError if its config asks for what only ModelLoop can do."""
        self._loss_check = self._loss_check or LossCheck(self.runtime.config.trainer)
        return self._loss_check

    def _check_has_no_loop(self, method: str, hint: str) -> None:
        if self._loop:
            raise TrainingError("was called a second time", place=method, hint=hint)

    def _get_model_loop(self, method: str) -> ModelLoop:
        if not isinstance(self._loop, ModelLoop):
            raise TrainingError(
                "needs a parallel model", place=method, hint="call run.prepare_training(model, optimizer, data) before the loop"
            )
        return self._loop

    def _report_saved_checkpoints(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        for checkpoint in checkpoints:
            self._reporter.report_checkpoint(checkpoint)
            self.callbacks.run_callbacks(CallbackEvent.saved, checkpoint.step, checkpoint.path)

    def _close_run(self, *, all_ranks_present: bool) -> None:
        try:
            if all_ranks_present:
                self._write_pending_metrics()
        finally:
            self._reporter.close()


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
