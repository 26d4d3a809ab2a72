"""What is trained. torchrun starts this file once a rank; yours to edit. Ways to start it:

swarmtrain deploy examples/quickstart.yml                   on a Docker Swarm
python training_code.py examples/quickstart.yml             here, in one process
torchrun --nproc-per-node 2 training_code.py examples/quickstart.yml
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel

import datautils
from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Result, Transformer, open_data, parallelize, runtime, train


class Options(BaseModel, extra="forbid"):
    """The config's `script` key: this file's own options."""

    dataset: Literal["files", "python_sources"] = "files"
    """files: data_prefixes are there already. python_sources: datautils makes them, one for training and one held out."""


def main() -> None:
    config = runtime.read_config(sys.argv[1:])
    options = runtime.read_options(Options, config)
    with runtime.start(config) as here:
        facts = prepare(config, here) if options.dataset == "python_sources" else {}
        data, held_out = open_data(config)
        model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), here)
        optimizer = Optimizer(model, config)
        result = train(here, model, optimizer, data, held_out, facts=facts)
        if here.first:
            sys.stdout.write(summary(result, facts) + "\n")


def prepare(config: Config, here: runtime.Runtime) -> dict[str, float]:
    """Make the data on this node, and measure what is to be beaten: the loss of a table of byte pairs."""
    training, held_out = datautils.only(config.data.data_prefixes), datautils.only(config.data.validation_data_prefixes)
    with here.local_first():
        datautils.python_sources(training, held_out)
    return {"baseline": datautils.bigram_loss(training, held_out)} if here.first else {}


def summary(result: Result, facts: dict[str, float]) -> str:
    """Return the line that a person waits for."""
    if result.loss_before is None or result.loss_after is None:
        return f"done: {result.step} steps"
    baseline = f"; a byte-bigram table: {facts['baseline']:.2f}" if facts else ""
    return f"held-out loss {result.loss_before:.2f} → {result.loss_after:.2f} nats per byte{baseline}"


if __name__ == "__main__":
    main()
