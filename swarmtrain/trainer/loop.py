"""The training loop: steps, validation, checkpoints and reports until the last step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import CheckpointManager, just_in_time
from swarmtrain.trainer.checkpoint.restore import restore_training_state
from swarmtrain.trainer.checkpoint.save_interval import SaveInterval
from swarmtrain.trainer.checkpoint.training_state import TrainingState
from swarmtrain.trainer.checkpoint_scheduler import CheckpointScheduler
from swarmtrain.trainer.data import vocabulary_check
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.diloco.optimizer import DilocoOptimizer
from swarmtrain.trainer.diloco.step import train_step as train_learners_step
from swarmtrain.trainer.diloco.training_state import DilocoTrainingState
from swarmtrain.trainer.health import replica_check
from swarmtrain.trainer.health.peer_monitor import PeerMonitor
from swarmtrain.trainer.health.step_timer import CHECKPOINT, LOGGING, VALIDATION, StepTimer
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout, StopFlag
from swarmtrain.trainer.inference.periodic_sampling import TrainingSampler
from swarmtrain.trainer.instrumentation import StepInstruments
from swarmtrain.trainer.loss_unit import find_loss_unit
from swarmtrain.trainer.metrics import RunReporter
from swarmtrain.trainer.metrics.audit_log import AuditLog
from swarmtrain.trainer.metrics.sinks.determined_trial import DeterminedTrial
from swarmtrain.trainer.non_finite_policy import NonFinitePolicy
from swarmtrain.trainer.optim import Optimizer, StatefulOptimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import StepRequest, StepResult, evaluate_model, is_stop_requested, train_step


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished run: its last step, and validation losses in nats per `loss_unit` (None without validation data)."""

    step: int
    initial_validation_loss: float | None
    final_validation_loss: float | None
    loss_unit: str
    """What the loss is a mean over: "token"; "byte", if each token is a byte; or the unit of another objective, such as "pair"."""


def train_model(
    runtime: Runtime,
    model: ParallelModel,
    optimizer: Optimizer,
    data: TokenDataset,
    validation_data: TokenDataset | None,
    *,
    extra_metrics: Mapping[str, Any],
) -> TrainingResult:
    """Train to the config's last step, resuming from the newest checkpoint. Collective: all ranks must call it.

    `extra_metrics` are added to the event that reports the end of the run.

    If a stop is requested on any rank (SIGTERM, or preemption by the Determined master), all ranks save a checkpoint of the same step and
    raise SystemExit(EXIT_PLANNED). If the Determined master was notified that the trial is not finished, the exit code is 0 instead.

    If a rank dies, the surviving ranks save a just-in-time checkpoint of the newest step for which they hold all shards.

    Raises TrainingError if training cannot continue, CheckpointError if a checkpoint cannot be written or loaded.
    """
    config, last_step = runtime.config.trainer, runtime.config.trainer.train_iterations
    collective_timeout, trial = CollectiveTimeout(model.mesh.process_groups), DeterminedTrial(runtime)
    training = select_training(runtime, model, optimizer, data)
    with (
        RunReporter(runtime, trial) as reporter,
        StopFlag(trial.should_preempt) as stop,
        StepInstruments(runtime, model, training.optimizer, collective_timeout) as instruments,
        PeerMonitor(model.mesh.process_groups, runtime.device) as peer_monitor,
    ):
        _check_same_data_on_all_ranks(runtime, data, validation_data)
        checkpoint_manager = CheckpointManager(runtime, training.state, data.fingerprint, reporter.report_warning)
        progress, resumed_from = restore_training_state(
            runtime, checkpoint_manager, training.state, data.fingerprint, reporter.report_warning
        )
        _check_vocabulary_and_report_start(
            runtime,
            data,
            validation_data,
            lambda: reporter.report_start(progress.step, resumed_from, checkpoint_manager.run_id, checkpoint_manager.generation, model),
        )
        checkpoint_scheduler = CheckpointScheduler(
            checkpoint_manager, SaveInterval(config, len(data), runtime.config.topology.samples_per_step), collective_timeout, reporter
        )
        non_finite_policy, sampling = NonFinitePolicy(runtime), TrainingSampler(runtime, model)
        timer, validation_loss = instruments.start_step_timer(data, progress.step), None
        audit_log = AuditLog(runtime.config.logger.audit_dir, checkpoint_manager.generation, runtime.rank)
        result: StepResult | None = None
        with just_in_time.save_checkpoint_on_peer_failure(
            runtime,
            model,
            training.optimizer,
            checkpoint_manager,
            get_progress=lambda: progress,
            on_saved=lambda step: reporter.write_missing_step_metrics(step, result),
        ):
            if is_stop_requested(stop):
                checkpoint_scheduler.save_and_exit(progress)
            while True:
                training.finish_round(progress.step, timer, collective_timeout, peer_monitor.raise_if_peer_failed)
                is_done = progress.step >= last_step
                if validation_data and (
                    is_done or progress.initial_validation_loss is None or _is_step_due(progress.step, config.eval_interval)
                ):
                    with timer.time_phase(VALIDATION):
                        validation = evaluate_model(runtime, model, validation_data, None if is_done else stop)
                    if validation is None:
                        checkpoint_scheduler.save_and_exit(progress)
                    validation_loss = validation.loss
                    progress = progress.with_validation_loss(validation_loss)
                    reporter.report_validation(progress.step, validation)
                reporter.report_samples(progress.step, sampling.generate_samples(progress.step, timer, is_last=is_done))
                if is_done:
                    break
                with timer.time_phase(CHECKPOINT):
                    checkpoint_scheduler.save_if_due(progress, save_requested=result is not None and result.save_requested)
                progress = non_finite_policy.skip_excluded_batches(progress)
                position, number = progress.consumed_samples, progress.step + 1
                with instruments.instrument_step(number):
                    result = training.run_step(
                        model,
                        StepRequest(
                            number,
                            position,
                            stop,
                            timer,
                            requests_save=runtime.is_rank_zero and checkpoint_scheduler.is_due_by_clock,
                            after_backward=instruments.record_tensor_statistics,
                            check_results=peer_monitor.raise_if_peer_failed,
                        ),
                    )
                    non_finite_policy.apply_policy(result, position, data)
                audit_log.write_step_record(result)  # before `progress` advances, so every step in a just-in-time checkpoint is recorded
                progress = progress.advance_to_step(number, position + runtime.config.topology.samples_per_step)
                with timer.time_phase(LOGGING):
                    reporter.report_step(result, instruments.phase_seconds)
                model = _compare_ranks(model, number, instruments, reporter)
                checkpoint_scheduler.report_saved_checkpoints()
                if _is_step_due(number, config.check_replicas_interval):
                    replica_check.check_replicas_match(runtime, model, training.optimizer, number)
                if result.stop_requested and number < last_step:
                    checkpoint_scheduler.save_and_exit(progress)
            checkpoint_scheduler.save_and_wait(progress)
        reporter.report_training_finished(
            progress.step,
            {"initial_validation_loss": progress.initial_validation_loss, "final_validation_loss": validation_loss, **extra_metrics},
        )
        return TrainingResult(
            progress.step, progress.initial_validation_loss, validation_loss, find_loss_unit(model.local_model.objective, validation_data)
        )


def _compare_ranks(model: ParallelModel, step: int, instruments: StepInstruments, reporter: RunReporter) -> ParallelModel:
    """Report stragglers if a comparison of all ranks is due after `step`.

    Return the model with the assignment of micro batches for the next steps. Collective: all ranks must call it.
    """
    timings, counts = instruments.gather_rank_timings(model.mesh), model.mesh.micro_batches_per_replica
    reporter.report_rank_timings(timings)
    new_counts = instruments.reassigner.reassign(timings, counts, step)
    if new_counts == counts:
        return model
    reporter.report_assignment(step, new_counts)
    return model.assign_micro_batches(new_counts)


@dataclass(frozen=True)
class Training:
    """How the steps of a run train its model: as a whole, or by learners (DiLoCo)."""

    optimizer: StatefulOptimizer
    state: TrainingState
    run_step: Callable[[ParallelModel, StepRequest], StepResult]
    """Function that runs a step of a model."""
    finish_round: Callable[[int, StepTimer, CollectiveTimeout, Callable[[], None]], None]
    """Function that is called between steps, with the number of the last step: see DilocoOptimizer.finish_round."""


def select_training(runtime: Runtime, model: ParallelModel, optimizer: Optimizer, data: TokenDataset) -> Training:
    """Return how the config trains `model`. `optimizer`: its optimizer, or the inner optimizer of the first local learner."""
    trainable_only = not runtime.config.trainer.save_frozen_parameters
    if runtime.config.topology.learners is None:
        state = TrainingState(model, optimizer, trainable_only)
        return Training(optimizer, state, lambda model, request: train_step(runtime, model, optimizer, data, request), lambda *_: None)
    learners = DilocoOptimizer(runtime, model, optimizer)
    return Training(
        learners,
        DilocoTrainingState(model, learners, trainable_only),
        lambda model, request: train_learners_step(runtime, model, learners, data, request),
        learners.finish_round,
    )


def _check_vocabulary_and_report_start(
    runtime: Runtime, data: TokenDataset, validation_data: TokenDataset | None, report_start: Callable[[], None]
) -> None:
    """Check that all tokens in the data are in the vocabulary, then report the start of the run. Raises DataError, TrainingError.

    Call this after restoring the checkpoint, which verifies that the data belongs to the run.
    """
    vocabulary_check.scan_token_files(runtime, [*data.all_token_files, *(validation_data.all_token_files if validation_data else ())])
    report_start()


def _is_step_due(step: int, interval: int | None) -> bool:
    return step > 0 and interval is not None and step % interval == 0


def _check_same_data_on_all_ranks(runtime: Runtime, data: TokenDataset, validation_data: TokenDataset | None) -> None:
    """Raise TrainingError if the training or validation data of any rank differs from rank 0's."""
    fingerprints = collectives.all_gather_values((data.fingerprint, validation_data.fingerprint if validation_data else "", runtime.node))
    for rank, (*rank_fingerprints, node) in enumerate(fingerprints):
        if rank_fingerprints != list(fingerprints[0][:-1]):
            raise TrainingError(
                f"rank {rank} on {node} has different data than rank 0 on {fingerprints[0][-1]}",
                place="config data",
                hint="prepare the token files from the same source on every node",
            )
