"""Simulation of the memory that one rank allocates while it starts, and in one step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.trainer.custom.model_loop import choose_training_method
from swarmtrain.trainer.health.step_timer import StepTimer
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout, StopFlag
from swarmtrain.trainer.memory.allocation_tracker import AllocationKind, AllocationTracker, MemoryPeak
from swarmtrain.trainer.memory.simulated_rank import SyntheticSamples, build_simulated_model, simulate_rank
from swarmtrain.trainer.optim import Optimizer, OptimizerUpdate
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.step import StepRequest


def simulate_memory_peaks(config: Config, world_size: int, rank: int) -> tuple[MemoryPeak, MemoryPeak]:
    """Return the memory peaks of `rank` in a run with `world_size` ranks: during startup, and during a step.

    Raises WorldError if the number of ranks does not match the config's topology, and any error that torch raises if an operation needs
    real data.
    """
    architecture = config.transformer_architecture
    tracker = AllocationTracker(
        vocabulary_size=architecture.vocab_size // config.topology.tensor_parallel_size,
        has_fp64_sums=architecture.precision is Precision.float32,
    )
    with simulate_rank(config, world_size, rank) as runtime, tracker.track_allocations():
        model = build_simulated_model(runtime)
        data = SyntheticSamples(config)
        training = choose_training_method(runtime, model, _TrackedOptimizer(model, config, tracker), data)
        tracker.assign_allocation_kind(training.optimizer.collect_state_tensors().values(), AllocationKind.optimizer_state)
        startup_end = tracker.get_allocation_history_position()
        step = config.topology.powersgd.start_step + 1  # PowerSGD compresses no gradients before
        with tracker.attribute_allocations_to_phase(None):
            training.run_step(model, StepRequest(step, 0, StopFlag()))
            training.finish_round(config.diloco.inner_steps, StepTimer(runtime.device), CollectiveTimeout([]), lambda: None)
        return tracker.find_memory_peak(0, startup_end), tracker.find_memory_peak(startup_end)


class _TrackedOptimizer(Optimizer):
    """Optimizer that records the allocation kinds of its tensors in the allocation history."""

    def __init__(self, model: ParallelModel, config: Config, tracker: AllocationTracker) -> None:
        super().__init__(model, config)
        self._tracker = tracker
        tracker.assign_allocation_kind(
            [*model.local_model.buffers(), *model.local_model.parameters(), *model.parameters.values()], AllocationKind.parameters
        )
        if model.gradient_compressor:
            tracker.assign_allocation_kind(model.gradient_compressor.collect_state_tensors().values(), AllocationKind.error_feedback)
        tracker.track_gradients(model.local_model.parameters())

    def prepare_step(self, number: int, *extra_scalars: Tensor, check_results: Callable[[], None] | None = None) -> OptimizerUpdate:
        self._tracker.assign_allocation_kind([parameter.grad for parameter in self.parameters.values()], AllocationKind.gradients)
        with self._tracker.attribute_allocations_to_phase(AllocationKind.optimizer_step):
            return super().prepare_step(number, *extra_scalars, check_results=check_results)

    def step(self, step_number: int) -> OptimizerUpdate:
        with self._tracker.attribute_allocations_to_phase(AllocationKind.optimizer_step):
            return super().step(step_number)
