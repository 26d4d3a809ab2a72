"""Steps of a parallel model on token files: gradients, updates, validation, and checkpoints that surviving ranks can write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from swarmtrain.config.schema.data import Packing
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import SavedCheckpoint, just_in_time
from swarmtrain.trainer.checkpoint.restore import restore_training_state
from swarmtrain.trainer.checkpoint.save_interval import SaveInterval
from swarmtrain.trainer.checkpoint.training_state import TrainingState
from swarmtrain.trainer.custom.training_loop import TrainingLoop
from swarmtrain.trainer.data import vocabulary_check
from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.diloco import step as learners_step
from swarmtrain.trainer.diloco.optimizer import DilocoOptimizer, DilocoTrainingState
from swarmtrain.trainer.health import replica_check
from swarmtrain.trainer.health.peer_monitor import PeerMonitor
from swarmtrain.trainer.health.step_timer import CHECKPOINT, DATA, LOGGING, VALIDATION, StepTimer
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout, StopFlag
from swarmtrain.trainer.inference.periodic_sampling import TrainingSampler
from swarmtrain.trainer.instrumentation import StepInstruments
from swarmtrain.trainer.loss_unit import find_loss_unit
from swarmtrain.trainer.metrics import RunReporter
from swarmtrain.trainer.metrics.audit_log import AuditLog
from swarmtrain.trainer.non_finite_policy import NonFinitePolicy
from swarmtrain.trainer.optim import Optimizer, StatefulOptimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import (
    StepRequest,
    StepResult,
    ValidationResult,
    apply_gradients,
    compute_gradients,
    evaluate_model,
    is_stop_requested,
)
from swarmtrain.trainer.tokenize import tokenizer_check


class ModelLoop(TrainingLoop):
    """The steps of a parallel model, to the config's last step. All methods are collective: every rank must call them."""

    required_calls: Mapping[str, str] = {
        **TrainingLoop.required_calls,
        "forward_backward": "gradients = run.forward_backward(batch)",
        "optimizer_step": "result = run.optimizer_step(gradients)",
    }

    def __init__(
        self,
        runtime: Runtime,
        model: ParallelModel,
        optimizer: Optimizer,
        data: TokenDataset,
        validation_data: TokenDataset | None,
        *,
        stop_flag: StopFlag,
        reporter: RunReporter,
        exit_stack: ExitStack,
    ) -> None:
        """Load the newest checkpoint, check the data, and report the start of the run.

        `exit_stack`: exit stack that is closed at the end of training, before the reporter. If a rank dies, the surviving ranks save a
        just-in-time checkpoint of the newest step for which they hold all shards.

        Raises TrainingError if the data differs between ranks or does not match the model, CheckpointError if no checkpoint can be loaded.
        """
        self.model, self._data, self._validation_data = model, data, validation_data
        self._collective_timeout = CollectiveTimeout(model.mesh.process_groups)
        self._training = choose_training_method(runtime, model, optimizer, data)
        self._instruments = exit_stack.enter_context(StepInstruments(runtime, model, self._training.optimizer, self._collective_timeout))
        self._peer_monitor = exit_stack.enter_context(PeerMonitor(model.mesh.process_groups, runtime.device))
        _check_same_data_on_all_ranks(runtime, data, validation_data)
        super().__init__(runtime, self._training.state, data.fingerprint, stop_flag, reporter)
        self.progress, resumed_from = restore_training_state(
            runtime, self.checkpoint_manager, self._training.state, data.fingerprint, reporter.report_warning
        )
        files = [*data.all_token_files, *(validation_data.all_token_files if validation_data else ())]
        collectives.run_on_rank_zero(lambda: tokenizer_check.check_tokenizers(runtime.config, files))
        # Restoring has verified that the data belongs to the run.
        vocabulary_check.scan_token_files(runtime, files)
        reporter.report_start(self.progress.step, resumed_from, self.checkpoint_manager.run_id, self.checkpoint_manager.generation, model)
        self._save_interval = SaveInterval(runtime.config.trainer, len(data), runtime.config.topology.samples_per_step)
        self._non_finite_policy, self._sampler = NonFinitePolicy(runtime), TrainingSampler(runtime, model)
        self._timer = self._instruments.start_step_timer(data, self.progress.step)
        self._audit_log = AuditLog(runtime.config.logger.audit_dir, self.checkpoint_manager.generation, runtime.rank)
        self._result: StepResult | None = None
        self._has_reported_samples_without_loss = False
        self._open_step = ExitStack()
        exit_stack.enter_context(
            just_in_time.save_checkpoint_on_peer_failure(
                runtime,
                model,
                self._training.optimizer,
                self.checkpoint_manager,
                get_progress=lambda: self.progress,
                on_saved=lambda step: reporter.write_missing_step_metrics(step, self._result),
            )
        )
        self._is_stopped_at_start = is_stop_requested(stop_flag)
        if not self._is_stopped_at_start:
            self._finish_round()

    @property
    def is_done(self) -> bool:
        """Whether the config's last step is complete."""
        return self.progress.step >= self.runtime.config.trainer.train_iterations

    @property
    def any_rank_requests_stop(self) -> bool:
        """Whether a stop was requested on any rank before the last step."""
        return not self.is_done and (self._result.stop_requested if self._result else self._is_stopped_at_start)

    @property
    def any_rank_requests_save(self) -> bool:
        """Whether a checkpoint is due by the clock of rank 0."""
        return self._result is not None and self._result.save_requested

    def check_before_save(self) -> None:
        """Nothing to check: a NaN/Inf loss or gradient never changes a parameter."""

    @property
    def loss_unit(self) -> str:
        """What the loss is a mean over: see TrainingResult."""
        return find_loss_unit(self.model.local_model.objective, self._validation_data)

    def describe_result(self) -> dict[str, Any]:
        """Return the validation losses before the first and after the last step."""
        return {"initial_validation_loss": self.progress.initial_validation_loss, "final_validation_loss": self.progress.validation_loss}

    def use_save_timeout(self) -> AbstractContextManager[None]:
        """Context manager that uses the initial timeout of collectives."""
        return self._collective_timeout.use_initial_timeout()

    def iterate_steps(self, data: Any, epochs: int | None, max_steps: int | None, global_batch_size: int | None) -> Iterator[GlobalBatch]:
        """Yield the global batches of `data` that are left to train on.

        Raises TrainingError if `data` is not the data with which the loop was created, or if a number of steps or samples is given, which
        the config has.
        """
        if data is not self._data or (epochs, max_steps, global_batch_size) != (None, None, None):
            raise TrainingError(
                "trains on the data of prepare_training(), for trainer.train_iterations steps of topology.global_batch_size samples",
                place="steps",
                hint="pass the same data, and set the numbers in the config",
            )
        config = self.runtime.config
        if config.data.packing is Packing.documents and not config.transformer_architecture.reset_attention_mask:
            self.reporter.report_warning(
                "data.packing: documents puts several documents into a sample, and they attend to each other; set "
                "transformer_architecture.reset_attention_mask and reset_position_ids: true"
            )
        while not self.is_done:
            self.progress = self._non_finite_policy.skip_excluded_batches(self.progress)
            step = self.progress.step
            self._timer.start_phase(DATA)
            batch = self._data.build_batch(self.progress.consumed_samples, self.runtime.config.topology.samples_per_step)
            self._report_samples_without_loss(batch)
            yield batch
            self.check_required_calls()
            if self.progress.step == step:
                raise TrainingError("has no update", place=f"step {step + 1}", hint="call run.optimizer_step(gradients) once per step")

    def _report_samples_without_loss(self, batch: GlobalBatch) -> None:
        """Warn once if pairs of `batch` have no loss token, since their prompts are as long as a sample."""
        count = len(batch.ids) - batch.loss_denominator
        if self._data.rows_per_sample > 1 and count and not self._has_reported_samples_without_loss:
            self._has_reported_samples_without_loss = True
            self.reporter.report_warning(
                f"{count} of the {len(batch.ids)} samples of step {self.progress.step + 1} have no loss token, and so do not count: their "
                f"prompts have {self._data.sequence_length} tokens or more; shorten them, or raise transformer_architecture.sequence_length"
            )

    def forward_backward(self, batch: GlobalBatch) -> Any:
        """Run the forward and backward passes of all micro batches of `batch`. Return the gradients, summed over ranks and clipped.

        Raises TrainingError if `batch` has another number of samples than the config's global batch.
        """
        self._called_names.add("forward_backward")
        config, number = self.runtime.config, self.progress.step + 1
        if len(batch.ids) != config.topology.samples_per_step:
            message = f"has {len(batch.ids)} samples, but topology.global_batch_size is {config.topology.samples_per_step}"
            raise TrainingError(message, place=f"the batch of step {number}", hint="pass a batch of run.steps()")
        self._request = StepRequest(
            number,
            self.progress.consumed_samples,
            self._stop,
            self._timer,
            requests_save=self.runtime.is_rank_zero and self._save_interval is not None and self._save_interval.is_due_by_clock,
            batch=batch,
            after_backward=self._instruments.record_tensor_statistics,
            check_results=self._peer_monitor.raise_if_peer_failed,
        )
        with ExitStack() as open_step:
            open_step.enter_context(self._instruments.instrument_step(number))
            gradients = self._training.compute_gradients(self.model, self._request)
            self._open_step = open_step.pop_all()  # optimizer_step() ends the step
        return gradients

    def optimizer_step(self, gradients: Any) -> StepResult:
        """Update the parameters with `gradients`, and exchange them between learners if that is due. Return the step's result.

        With a NaN/Inf loss or gradient no parameter changes. Raises TrainingError if trainer.non_finite ends the run then.
        """
        self._called_names.add("optimizer_step")
        position = self.progress.consumed_samples
        with self._open_step:
            self._result = result = self._training.apply_gradients(self.model, gradients, self._request)
            self._non_finite_policy.apply_policy(result, position, self._data)
        self._audit_log.write_step_record(result)  # before `progress` advances, so every step in a just-in-time checkpoint is recorded
        self.progress = self.progress.advance_to_step(result.number, position + self.runtime.config.topology.samples_per_step)
        self._finish_round()
        return result

    def report_step(self, result: StepResult, metrics: Mapping[str, Any]) -> None:
        """Report the result of a step, with additional `metrics`."""
        with self._timer.time_phase(LOGGING):
            self.reporter.report_step(result, self._instruments.phase_seconds, metrics)

    def check_ranks_if_due(self) -> None:
        """Compare the speed of all ranks, and the parameters of all replicas, if that is due.

        The assignment of micro batches may change for the next steps. Raises TrainingError if replicas differ.
        """
        step, counts = self.progress.step, self.model.mesh.micro_batches_per_replica
        timings = self._instruments.gather_rank_timings(self.model.mesh)
        self.reporter.report_rank_timings(timings)
        new_counts = self._instruments.reassigner.reassign(timings, counts, step)
        if new_counts != counts:
            self.reporter.report_assignment(step, new_counts)
            self.model = self.model.assign_micro_batches(new_counts)
        if self._is_due(self.runtime.config.trainer.check_replicas_interval):
            replica_check.check_replicas_match(self.runtime, self.model, self._training.optimizer, step)

    @property
    def is_evaluation_due(self) -> bool:
        """Whether to evaluate after this step: before the first step, every trainer.eval_interval steps, and after the last step."""
        return self.is_done or self.progress.initial_validation_loss is None or self._is_due(self.runtime.config.trainer.eval_interval)

    def evaluate(self, validation_data: TokenDataset) -> ValidationResult | None:
        """Evaluate the model on `validation_data`, and return the result. Return None if a stop was requested meanwhile."""
        with self._timer.time_phase(VALIDATION):
            result = evaluate_model(self.runtime, self.model, validation_data, None if self.is_done else self._stop)
        if result is not None:
            self.progress = self.progress.with_validation_loss(result.loss)
            self.reporter.report_validation(self.progress.step, result)
        return result

    def sample_if_due(self) -> None:
        """Generate and report completions of the prompts in trainer.sampling_config, if they are due."""
        samples = self._sampler.generate_samples(self.progress.step, self._timer, is_last=self.is_done)
        self.reporter.report_samples(self.progress.step, samples)

    def save_if_due(self, metric: float | None) -> list[SavedCheckpoint]:
        """Save this step if a checkpoint is due: see TrainingLoop.save_if_due."""
        with self._timer.time_phase(CHECKPOINT):
            return super().save_if_due(metric)

    def _finish_round(self) -> None:
        self._training.finish_round(self.progress.step, self._timer, self._collective_timeout, self._peer_monitor.raise_if_peer_failed)

    def _is_due(self, interval: int | None) -> bool:
        return self.progress.step > 0 and interval is not None and self.progress.step % interval == 0


@dataclass(frozen=True)
class TrainingMethod:
    """How the steps of a run train its model: as a whole, or by learners (DiLoCo)."""

    optimizer: StatefulOptimizer
    state: TrainingState
    compute_gradients: Callable[[ParallelModel, StepRequest], Any]
    """Function that runs the forward and backward passes of a step."""
    apply_gradients: Callable[[ParallelModel, Any, StepRequest], StepResult]
    """Function that updates the parameters with the result of `compute_gradients`."""
    finish_round: Callable[[int, StepTimer, CollectiveTimeout, Callable[[], None]], None]
    """Function that is called between steps, with the number of the last step: see DilocoOptimizer.finish_round."""

    def run_step(self, model: ParallelModel, request: StepRequest) -> StepResult:
        """Run a whole step of `model`."""
        return self.apply_gradients(model, self.compute_gradients(model, request), request)


def choose_training_method(runtime: Runtime, model: ParallelModel, optimizer: Optimizer, data: TokenDataset) -> TrainingMethod:
    """Return how the config trains `model`. `optimizer`: its optimizer, or the inner optimizer of the first local learner."""
    trainable_only = not runtime.config.trainer.save_frozen_parameters
    if runtime.config.topology.learners is None:
        return TrainingMethod(
            optimizer,
            TrainingState(model, optimizer, trainable_only),
            lambda model, request: compute_gradients(runtime, model, optimizer, data, request),
            lambda model, gradients, request: apply_gradients(model, optimizer, data, gradients, request),
            lambda *_: None,
        )
    learners = DilocoOptimizer(runtime, model, optimizer)
    return TrainingMethod(
        learners,
        DilocoTrainingState(model, learners, trainable_only),
        lambda model, request: learners_step.compute_gradients(runtime, model, learners, data, request),
        lambda model, gradients, request: learners_step.apply_gradients(model, learners, data, gradients, request),
        learners.finish_round,
    )


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
