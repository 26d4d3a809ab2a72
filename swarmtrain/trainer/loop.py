"""Training in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmtrain.trainer.custom import TrainingResult, start_run
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime


def train_model(
    runtime: Runtime,
    model: ParallelModel,
    optimizer: Optimizer,
    data: TokenDataset,
    validation_data: TokenDataset | None,
    *,
    extra_metrics: Mapping[str, Any],
) -> TrainingResult:
    """Train to the config's last step, resuming from the newest checkpoint: the loop of training_code.py. Collective.

    `extra_metrics` are added to the event that reports the end of the run.

    If a stop is requested on any rank (SIGTERM, or preemption by the Determined master), all ranks save a checkpoint of the same step and
    raise SystemExit(EXIT_PLANNED). If the Determined master was notified that the trial is not finished, the exit code is 0 instead.

    Raises TrainingError if training cannot continue, CheckpointError if a checkpoint cannot be written or loaded.
    """
    with start_run(runtime) as run:
        run.prepare_training(model, optimizer, data, validation_data)
        run.evaluate_if_due(validation_data)
        run.sample_if_due()
        for batch in run.steps(data):
            result = run.optimizer_step(run.forward_backward(batch))
            run.log_step(result)
            run.check_ranks_if_due()
            if run.stop_requested:
                run.save_and_exit()
            run.evaluate_if_due(validation_data)
            run.sample_if_due()
            run.save_if_due()
        return run.finish(**extra_metrics)
