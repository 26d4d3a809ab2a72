"""The training script: torchrun starts this file once per rank. Edit it as needed. To start it:

swarmtrain deploy examples/quickstart.yml                   on a Docker Swarm
python training_code.py examples/quickstart.yml             on this machine, in one process
torchrun --nproc-per-node 2 training_code.py examples/quickstart.yml
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel

import datautils
import swarmtrain.trainer
from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Runtime, TrainingResult, Transformer, open_data, parallelize, read_config, read_options


class Options(BaseModel, extra="forbid"):
    """Options of this file: the config's `script` key."""

    dataset: Literal["files", "python_sources"] = "files"
    """files: the token files of data_prefixes exist. python_sources: datautils writes them, for training and for validation."""


def main() -> None:
    config = read_config(sys.argv[1:])
    options = read_options(Options, config)
    with swarmtrain.trainer.run(config, monitors_peers=True) as run:
        baseline = prepare_data(config, run.runtime) if options.dataset == "python_sources" else {}
        data, validation_data = open_data(config)
        # Without initial values: prepare_training() writes them only if no checkpoint has others.
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), run.runtime, initialize=False)
        optimizer = Optimizer(model, config)
        run.prepare_training(model, optimizer, data, validation_data)
        run.evaluate_if_due(validation_data)
        run.sample_if_due()

        for batch in run.steps(data):
            gradients = run.forward_backward(batch)  # of all micro batches, summed over all ranks and clipped
            result = run.optimizer_step(gradients)
            run.log_step(result)  # log_step(result, name=number) logs your own metrics too
            run.check_ranks_if_due()
            if run.stop_requested:
                run.save_and_exit()
            run.evaluate_if_due(validation_data)
            run.sample_if_due()
            run.save_if_due()

        training_result = run.finish(**baseline)
        if run.rank == 0:
            sys.stdout.write(format_summary(training_result, baseline) + "\n")


def prepare_data(config: Config, runtime: Runtime) -> dict[str, float]:
    """Write the data on this node; on rank 0, return the baseline: the validation loss, in nats per byte, of a byte-bigram model."""
    training, validation = (
        datautils.require_single_prefix(config.data.data_prefixes),
        datautils.require_single_prefix(config.data.validation_data_prefixes),
    )
    with runtime.local_rank_zero_first():
        datautils.write_python_sources(training, validation)
    return {"bigram_baseline_loss": datautils.compute_bigram_loss(training, validation)} if runtime.is_rank_zero else {}


def format_summary(result: TrainingResult, baseline: dict[str, float]) -> str:
    """Return a one-line summary of `result`: the validation loss before and after training, and the baseline."""
    if result.initial_validation_loss is None or result.final_validation_loss is None:
        return f"done: {result.step} steps"
    comparison = f"; byte-bigram baseline {baseline['bigram_baseline_loss']:.2f}" if baseline else ""
    unit = "byte" if baseline else result.loss_unit  # the tokens of python_sources are bytes
    return f"validation loss {result.initial_validation_loss:.2f} → {result.final_validation_loss:.2f} nats per {unit}{comparison}"


if __name__ == "__main__":
    main()
