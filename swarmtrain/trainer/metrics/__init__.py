"""Reports on a run: log lines, events for the coordinator, and metrics lines for the sinks.

Only rank 0 posts events and writes metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from swarmtrain import protocol
from swarmtrain.protocol import Event, format_micro_batch_counts
from swarmtrain.trainer import run_report
from swarmtrain.trainer.checkpoint import SavedCheckpoint
from swarmtrain.trainer.health.rank_timing import RankTiming
from swarmtrain.trainer.health.stragglers import StragglerDetector, find_slow_ranks
from swarmtrain.trainer.metrics.audit_log import replace_non_finite
from swarmtrain.trainer.metrics.event_sender import EventSender
from swarmtrain.trainer.metrics.memory_usage import read_memory_usage
from swarmtrain.trainer.metrics.sinks import Sinks, get_metrics_folder
from swarmtrain.trainer.metrics.sinks.determined_trial import DeterminedTrial
from swarmtrain.trainer.metrics.sinks.jsonl import append_missing_step_metrics
from swarmtrain.trainer.metrics.sinks.metrics_lines import SAMPLES_KEY, GeneratedSample
from swarmtrain.trainer.metrics.throughput import Throughput, compute_flops_per_token, find_peak_flops
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import StepResult, ValidationResult

LOG = logging.getLogger("swarmtrain")
_FLUSH_TIMEOUT_SECONDS = 10.0


class RunReporter:
    """Logs a run, posts its events and writes its metrics lines."""

    def __init__(self, runtime: Runtime, trial: DeterminedTrial) -> None:
        self._runtime, self._trial = runtime, trial
        self._total_steps: int | None = None
        """Last step of the run; None if the script decides when it ends."""
        self._event_sender = EventSender(runtime.coordinator_address) if runtime.is_rank_zero and runtime.coordinator_address else None
        self._sinks = Sinks(trial)
        self._throughput = Throughput()
        self._straggler_detector = StragglerDetector()
        self._straggler_fields: dict[str, Any] = {}
        """Metrics about stragglers that are added to the next metrics line."""
        self._flops_per_token = 0
        """FLOPs per token of a forward and backward pass."""
        self._peak_flops: float | None = None
        """Peak FLOPS of one device; None if unknown."""
        self._replica_count = 1
        self._replica_nodes: list[str] = []
        """For each replica, the node of its first rank."""
        self._micro_batch_counts: dict[str, list[int]] = {}
        """Number of micro batches of each replica, by node; empty unless they are assigned by speed."""
        self._memory_usage: dict[str, int] = {}

    def close(self) -> None:
        """Post the pending events, and close the sinks."""
        self._sinks.close()
        if self._event_sender:
            self._event_sender.close(_FLUSH_TIMEOUT_SECONDS)

    def report_start(self, step: int, resumed_from: Path | None, run_id: str, generation: int, model: ParallelModel) -> None:
        """Report that training of `model` starts after `step`, and open the sinks. Collective: all ranks must call it.

        `generation`: generation of the current world. `resumed_from`: path of the checkpoint from which training
        resumes; None if it starts from scratch. `run_id`: id of the run, for its checkpoints. Raises TrainingError if a sink cannot be
        opened.
        """
        config, mesh = self._runtime.config, model.mesh
        self._total_steps = config.trainer.train_iterations
        self._report_environment(generation, model.parameter_count, mesh)
        LOG.info(
            "world %d: ranks %d, replicas %d, parameters %s",
            generation,
            self._runtime.world_size,
            mesh.replica_count,
            f"{model.parameter_count:,}",
        )
        self._report_resume(step, resumed_from, run_id)
        self._flops_per_token, self._replica_count = (
            compute_flops_per_token(config.transformer_architecture, model.parameter_count),
            mesh.replica_count,
        )
        if self._runtime.device.type == "cuda":
            self._peak_flops = find_peak_flops(torch.cuda.get_device_name(self._runtime.device), config.transformer_architecture.precision)
        if config.topology.reassigns_micro_batches(mesh.data_size):
            self._micro_batch_counts = self._group_by_node(mesh.micro_batches_per_replica)
        self._sinks.open(self._runtime, step)
        self._throughput = Throughput()

    def report_script_start(self, step: int, resumed_from: Path | None, run_id: str, generation: int, parameter_count: int) -> None:
        """Report that the training of a custom script starts after `step`: as report_start, without its model and sinks."""
        self._report_environment(generation, parameter_count, None)
        self._report_resume(step, resumed_from, run_id)

    def open_sinks(self, step: int) -> None:
        """Open the sinks of a run that resumes from `step`. Raises TrainingError if a sink cannot be opened."""
        self._sinks.open(self._runtime, step)

    def _report_resume(self, step: int, resumed_from: Path | None, run_id: str) -> None:
        if resumed_from and self._runtime.is_rank_zero:
            LOG.info("resuming from step %d, from %s", step, resumed_from)
            self._post_event(protocol.EVENT_RESUMED, step=step, path=str(resumed_from), run_id=run_id)

    def _report_environment(self, generation: int, parameter_count: int, mesh: Mesh | None) -> None:
        report = run_report.gather_run_report(self._runtime, generation, parameter_count, mesh)
        if not self._runtime.is_rank_zero:
            return
        for line in run_report.format_report_summary(report):
            LOG.info("%s", line)
        if mesh:
            first_nodes = {rank["data_rank"]: rank["node"] for rank in reversed(report["ranks"])}
            self._replica_nodes = [first_nodes[replica] for replica in range(mesh.data_size)]
        if folder := get_metrics_folder(self._runtime):
            run_report.write_run_report(report, folder)
        for node, node_fields in run_report.summarize_nodes(report):
            self._post_event(protocol.EVENT_RUN_REPORT, node=node, **node_fields)

    def report_metrics(self, metrics_lines: Sequence[dict[str, Any]]) -> None:
        """Write the metrics lines of consecutive steps to the sinks; log the last one, and post it to the coordinator."""
        for line in metrics_lines:
            self._sinks.write_metrics(line)
        for line in metrics_lines[-1:]:
            LOG.info(
                "%s", "  ".join(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items())
            )
            if self._event_sender:
                numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
                self._event_sender.queue_progress_event(Event(protocol.EVENT_PROGRESS, numbers))

    def report_step(self, result: StepResult, phase_seconds: Mapping[str, float], extra_metrics: Mapping[str, Any]) -> None:
        """Report an optimizer step, completed or skipped, with `extra_metrics` of the script.

        `phase_seconds`: time per phase of the most recent step with known timings.
        """
        step, update = result.number, result.update
        self._throughput.record_step(result.loss_tokens)
        tokens_per_second, eta = (
            self._throughput.tokens_per_second,
            self._throughput.estimate_seconds_left((self._total_steps or step) - step),
        )
        values = {
            "loss": replace_non_finite(result.loss),
            "learning_rate": update.learning_rate,
            "tokens_per_second": round(tokens_per_second, 1),
        }
        extra_metrics = self._compute_extra_metrics(result, tokens_per_second, phase_seconds) | dict(extra_metrics)
        should_log = step % self._runtime.config.logger.log_interval == 0 or step == self._total_steps
        memory = read_memory_usage(self._runtime.device) if should_log else {}
        time_fields = {
            f"{phase}_seconds": round(seconds, 6)
            for phase, seconds in {"step": sum(phase_seconds.values()), **phase_seconds}.items()
            if phase_seconds
        }
        self._sinks.write_metrics(
            {
                "step": step,
                **values,
                **extra_metrics,
                **time_fields,
                **{f"memory_{kind}": size for kind, size in memory.items()},
                **self._straggler_fields,
            }
        )
        self._straggler_fields = {}
        if self._event_sender:
            self._memory_usage = memory or self._memory_usage
            fields = {
                "step": step,
                "steps": self._total_steps,
                **values,
                **extra_metrics,
                "phases": phase_seconds,
                "memory": self._memory_usage,
                **({"micro_batches": self._micro_batch_counts} if self._micro_batch_counts else {}),
            }
            self._event_sender.queue_progress_event(Event(protocol.EVENT_PROGRESS, {**fields, "eta_seconds": round(eta, 1)}))
        if should_log or result.is_skipped:
            skip_reason = result.non_finite_reason or f"gradients overflow at loss scale {update.loss_scale or 1:g}"
            LOG.info(
                "%s  loss %.4f%s  lr %.2e  grad norm %.2f  %s tokens/s%s  eta %s%s",
                self._format_step(step),
                result.loss,
                _format_accuracy(result.accuracy),
                update.learning_rate,
                update.gradient_norm,
                f"{tokens_per_second:,.0f}",
                f"  mfu {extra_metrics['mfu']:.1%}" if "mfu" in extra_metrics else "",
                timedelta(seconds=round(eta)),
                f"  skipped: {skip_reason}" if result.is_skipped else "",
            )

    def _compute_extra_metrics(self, result: StepResult, tokens_per_second: float, phase_seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return the metrics of a step other than loss, learning rate and speed. Metrics that do not apply are omitted."""
        update, world_size = result.update, self._runtime.world_size
        extra_metrics: dict[str, Any] = {
            "gradient_norm": replace_non_finite(update.gradient_norm),
            "tflops": round(tokens_per_second * self._flops_per_token / 1e12, 4),
        }
        if result.accuracy is not None:
            extra_metrics["accuracy"] = result.accuracy
        if self._replica_count > 1:
            extra_metrics["max_replica_loss"] = replace_non_finite(result.max_replica_loss)
        if world_size > 1:
            extra_metrics["tokens_per_second_per_device"] = round(tokens_per_second / world_size, 1)
        if self._peak_flops:
            extra_metrics["mfu"] = round(tokens_per_second * self._flops_per_token / self._peak_flops / world_size, 4)
        if len(update.learning_rates) > 1:
            extra_metrics |= {f"learning_rate/{name}": rate for name, rate in update.learning_rates.items()}
        if update.loss_scale is not None:
            extra_metrics |= {"loss_scale": update.loss_scale, "skipped": result.is_skipped}
        return extra_metrics | ({"skipped": True} if result.is_skipped else {}) | ({"clipped": True} if update.clipped else {})

    def report_rank_timings(self, timings: list[RankTiming] | None) -> None:
        """Report the slowest rank, and any straggler. `timings`: timings of all ranks; None if no comparison was due."""
        if not self._runtime.is_rank_zero or timings is None:
            return
        slow_ranks = find_slow_ranks(timings)
        self._straggler_fields = (
            {"slowest_rank": slow_ranks[0].rank, "slowest_rank_slowdown": round(slow_ranks[0].slowdown, 3)}
            if slow_ranks
            else {"slowest_rank_slowdown": 0.0}
        )
        if change := self._straggler_detector.add_comparison(slow_ranks):
            LOG.warning("%s", change.message)
            fields = asdict(change.straggler) if change.straggler else {"rank": None}
            self._post_event(protocol.EVENT_STRAGGLER, **fields, message=change.message)

    def report_assignment(self, step: int, counts: Sequence[int]) -> None:
        """Report that the steps after `step` have another assignment of micro batches. `counts`: their number for each replica."""
        if self._runtime.is_rank_zero:
            self._micro_batch_counts = self._group_by_node(counts)
            text = format_micro_batch_counts(self._micro_batch_counts)
            LOG.info("%s  micro batches by speed: %s", self._format_step(step), text)

    def _group_by_node(self, counts: Sequence[int]) -> dict[str, list[int]]:
        """Return `counts`, one for each replica, by the nodes of the replicas. Empty on other ranks than rank 0."""
        counts_by_node: dict[str, list[int]] = {}
        for node, count in zip(self._replica_nodes, counts, strict=False):
            counts_by_node.setdefault(node, []).append(count)
        return counts_by_node

    def write_missing_step_metrics(self, step: int, last_step_result: StepResult | None) -> None:
        """Append the metrics line of `step`, which this rank has saved in a just-in-time checkpoint, if the line is missing.

        Rank 0 may have died before it wrote the line. `last_step_result`: result of the last step on this rank; used only if that step is
        `step`.
        """
        folder = get_metrics_folder(self._runtime)
        if folder and last_step_result and last_step_result.number == step:
            update = last_step_result.update
            values = {
                "loss": replace_non_finite(last_step_result.loss),
                "learning_rate": update.learning_rate,
                "gradient_norm": replace_non_finite(update.gradient_norm),
            }
            append_missing_step_metrics(folder, step, values)

    def report_validation(self, step: int, result: ValidationResult) -> None:
        """Report the validation result after `step`."""
        loss, accuracy = result.loss, result.accuracy
        LOG.info("%s  validation loss %.4f%s", self._format_step(step), loss, _format_accuracy(accuracy))
        accuracy_field = {} if accuracy is None else {"validation_accuracy": accuracy}
        finite_loss = replace_non_finite(loss)  # else the NaN would be the lowest loss to programs that compare metrics
        self._sinks.write_metrics({"step": step, "validation_loss": finite_loss, **accuracy_field})
        self._post_event(protocol.EVENT_EVALUATION, step=step, loss=finite_loss)

    def report_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        """Report the texts that the model generated from prompts after `step`."""
        for sample in samples:
            text = f"{sample['prompt']}{sample['text']}".replace("\n", "\\n")
            LOG.info("%s  sample: %s", self._format_step(step), text)
        if samples:
            self._sinks.write_metrics({"step": step, SAMPLES_KEY: samples})

    def report_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """Report a committed checkpoint."""
        if self._runtime.is_rank_zero:
            step, seconds = checkpoint.step, checkpoint.save_seconds
            message = f"saved {checkpoint.path} in {seconds:.2f} s (training stalled for {checkpoint.stall_seconds:.2f} s)"
            LOG.info("%s  %s", self._format_step(step), message)
            self._post_event(protocol.EVENT_CHECKPOINT, step=step, path=str(checkpoint.path), seconds=round(seconds, 3))

    def report_warning(self, message: str) -> None:
        """Log a warning and post it to the coordinator, on rank 0."""
        if self._runtime.is_rank_zero:
            LOG.warning("%s", message)
            self._post_event(protocol.EVENT_NOTE, node=self._runtime.node, message=message)

    def report_graceful_exit(self, step: int) -> int:
        """Report that all ranks exit gracefully after `step`, and return the exit code. Collective: all ranks must call it."""
        LOG.info("stop requested: exiting after step %d", step)
        return self._trial.acknowledge_preemption()

    def report_training_finished(self, step: int, final_metrics: dict[str, Any]) -> None:
        """Report that training has finished at `step`, and that the checkpoint of this step is committed."""
        if self._total_steps is None:
            LOG.info("finished at step %d", step)
        self._post_event(protocol.EVENT_TRAINING_FINISHED, step=step, **final_metrics)

    def _format_step(self, step: int) -> str:
        return f"step {step}" if self._total_steps is None else f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _post_event(self, kind: str, **data: Any) -> None:
        if self._event_sender:
            self._event_sender.queue_event(Event(kind, data))


def _format_accuracy(accuracy: float | None) -> str:
    """Return `accuracy` as a percentage to append to a log line; empty if it is None."""
    return "" if accuracy is None else f"  accuracy {accuracy:.1%}"
