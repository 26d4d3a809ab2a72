"""Instrumentation of training steps: hang detection, NaN/Inf checks, out-of-memory reports, garbage collection and timing."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from torch import Tensor

from swarmtrain.trainer import out_of_memory
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.health.micro_batch_assignment import MicroBatchReassigner
from swarmtrain.trainer.health.rank_timing import RankTimer, RankTiming
from swarmtrain.trainer.health.step_timer import StepTimer
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout
from swarmtrain.trainer.health.watchdog import Watchdog
from swarmtrain.trainer.metrics.profiler import TorchProfiler
from swarmtrain.trainer.metrics.tensor_stats_recorder import TensorStatsRecorder
from swarmtrain.trainer.metrics.timeline import TimelineRecorder
from swarmtrain.trainer.optim import StatefulOptimizer, gradient_checks
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.runtime import Runtime

_FREEZE_AFTER_STEPS = 2
"""Number of steps after which all long-lived objects exist."""
_COLLECT_INTERVAL_STEPS = 50


class GcController:
    """Context manager that disables automatic garbage collection; `collect_garbage_if_due` runs it on all ranks at the same step.

    By default each rank's garbage collector runs at a different time, and scans all objects that imports have created, while all other
    ranks wait in the next collective. Objects that exist after the first steps are frozen permanently; newer ones are collected at an
    interval of steps.
    """

    def __init__(self) -> None:
        self._steps_done = 0
        self._was_enabled = True

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def collect_garbage_if_due(self, step: int) -> None:
        """Run the garbage collector if it is due after step `step` of the run. Called on all ranks at the same step."""
        self._steps_done += 1
        if self._steps_done == _FREEZE_AFTER_STEPS:
            gc.collect()
            gc.freeze()
        elif step % _COLLECT_INTERVAL_STEPS == 0:
            gc.collect()


class StepInstruments:
    """Context manager that detects hangs, and runs the garbage collector only between steps.

    Call `start_step_timer` before the first step."""

    _rank_timer: RankTimer
    _timer: StepTimer
    _timeline: TimelineRecorder
    _tensor_stats: TensorStatsRecorder
    phase_seconds: Mapping[str, float]
    """Duration in seconds of each phase, for the last step whose timing is complete."""

    def __init__(self, runtime: Runtime, model: ParallelModel, optimizer: StatefulOptimizer, collective_timeout: CollectiveTimeout) -> None:
        self._runtime, self._model, self._optimizer, self._collective_timeout = runtime, model, optimizer, collective_timeout
        self.reassigner = MicroBatchReassigner(runtime.config.topology)
        self._watchdog, self._gc_controller, self._profiler = Watchdog(runtime), GcController(), TorchProfiler(runtime)

    def __enter__(self) -> Self:
        self._watchdog.__enter__()
        self._gc_controller.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profiler.close()
        if kind is None:
            self._timeline.close()
            self._tensor_stats.close()
        self._gc_controller.__exit__(kind, error, trace)
        self._watchdog.__exit__(kind, error, trace)

    def start_step_timer(self, data: TokenDataset, step: int) -> StepTimer:
        """Start timing with the step after `step`, and return the step timer, which is notified at the start of each phase.

        Collective: all ranks must call it. Raises TrainingError if an output file cannot be opened.
        """
        self._tensor_stats = TensorStatsRecorder(self._runtime, self._model, step)
        self._rank_timer, self._timer = RankTimer(self._runtime, self._model, data), StepTimer(self._runtime.device)
        if self._runtime.config.topology.reassigns_micro_batches(self._model.mesh.data_size):
            self._timer.listeners.append(self._rank_timer.record_passes)
        self._timeline = TimelineRecorder(self._runtime, self._model.mesh, self._timer)
        return self._timer

    def record_tensor_statistics(self) -> None:
        """Record the tensor statistics of the step. Call it after the backward passes, once gradients are summed over replicas.

        Collective: all ranks must call it.
        """
        self._tensor_stats.record_gradients()

    def gather_rank_timings(self, mesh: Mesh) -> list[RankTiming] | None:
        """Return the timings of all ranks, in rank order, if a comparison is due after this step, else None.

        `mesh`: the mesh, with the assignment of micro batches in this step. Collective: all ranks must call it.
        """
        return self._rank_timer.gather_timings(mesh)

    @contextmanager
    def instrument_step(self, step: int) -> Iterator[None]:
        """Context manager for step `step`, which runs in the body. Collective: all ranks must call it.

        It times the step, detects hangs, and re-raises out-of-memory and NaN errors with an explanation. It runs garbage collection, the
        profiler and the tensor statistics recorder if they are due.
        """
        self._profiler.start_trace_if_due()
        self._tensor_stats.start_recording_if_due(step)
        start_time, place = time.monotonic(), f"step {step} on rank {self._runtime.rank}"
        with (
            self._watchdog.watch_step(step),
            gradient_checks.explain_torch_errors(step),
            out_of_memory.explain_out_of_memory_error(place, self._group_tensors_by_purpose),
            self._rank_timer.measure_step(),
        ):
            yield
        self._collective_timeout.record_step_time(time.monotonic() - start_time)
        self._gc_controller.collect_garbage_if_due(step)
        self._profiler.write_trace_if_due()
        self.phase_seconds = self._timer.end_step()
        self._timeline.record_step_end(step)

    def _group_tensors_by_purpose(self) -> dict[str, list[Tensor | None]]:
        parameters = list(self._model.parameters.values())
        gradients = [parameter.grad for parameter in parameters]
        return {"parameters": [*parameters], "gradients": gradients, "optimizer state": [*self._optimizer.collect_state_tensors().values()]}
