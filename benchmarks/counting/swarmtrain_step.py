"""Count the operations of one step of swarmtrain's trainer: `python -m benchmarks.counting.swarmtrain_step REQUESTS`."""

from __future__ import annotations

from functools import partial

from benchmarks.counting.operation_counter import OperationCosts, OperationCounter
from benchmarks.counting.requests import answer_requests
from swarmtrain.config import Config
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.memory.simulated_rank import SyntheticSamples, build_simulated_model, simulate_rank
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.step import StepRequest, train_step


def count_step_costs(config: Config, world_size: int) -> tuple[OperationCosts, OperationCosts]:
    """Return the costs of one step on rank 0 of `world_size` ranks: of its forward and backward passes, and of the rest of the step."""
    counter, after_backward = OperationCounter(), OperationCosts()

    def record_backward_end() -> None:
        nonlocal after_backward
        after_backward = counter.total

    with simulate_rank(config, world_size, 0) as runtime:
        model = build_simulated_model(runtime)
        optimizer = Optimizer(model, config, device_type="cuda")
        run_step = partial(train_step, runtime, model, optimizer, SyntheticSamples(config))
        with counter:
            run_step(StepRequest(1, 0, StopFlag()))  # might allocate what later steps use again
            after_first_step = counter.total
            run_step(StepRequest(2, 0, StopFlag(), after_backward=record_backward_end))
    return after_backward - after_first_step, counter.total - after_backward


if __name__ == "__main__":
    answer_requests(count_step_costs)
