"""The training script of the run that fails: it keeps the output of every block for a plot, until the container's memory is full.

Otherwise it is the quickstart's training_code.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from swarmtrain.trainer import Optimizer, Transformer, open_data, parallelize, read_config, read_options, start_runtime, train_model
from training_code import Options, prepare_data

ACTIVATIONS: list[torch.Tensor] = []


def store_output(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    """Keep what a block returns. This is the mistake: nothing ever frees it."""
    ACTIVATIONS.append(output.detach().clone())


def main() -> None:
    config = read_config(sys.argv[1:])
    read_options(Options, config)
    with start_runtime(config) as runtime:
        facts = prepare_data(config, runtime)
        data, validation_data = open_data(config)
        transformer = Transformer(config.transformer_architecture, config.trainer.seed)
        for block in transformer.blocks:
            block.register_forward_hook(store_output)
        model = parallelize(transformer, runtime)
        train_model(runtime, model, Optimizer(model, config), data, validation_data, extra_metrics=facts)


if __name__ == "__main__":
    main()
