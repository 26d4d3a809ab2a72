"""The training script of the run that fails: it keeps the output of every block for a plot, until the container's memory is full.

Otherwise it is the quickstart's training_code.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from swarmtrain.trainer import Optimizer, Transformer, open_data, parallelize, runtime, train
from training_code import Options, prepare

ACTIVATIONS: list[torch.Tensor] = []


def remember(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    """Keep what a block returns. This is the mistake: nothing ever frees it."""
    ACTIVATIONS.append(output.detach().clone())


def main() -> None:
    config = runtime.read_config(sys.argv[1:])
    runtime.read_options(Options, config)
    with runtime.start(config) as here:
        facts = prepare(config, here)
        data, validation_data = open_data(config)
        transformer = Transformer(config.transformer_architecture, config.trainer.seed)
        for block in transformer.blocks:
            block.register_forward_hook(remember)
        model = parallelize(transformer, here)
        train(here, model, Optimizer(model, config), data, validation_data, facts=facts)


if __name__ == "__main__":
    main()
