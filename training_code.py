"""What is trained. torchrun starts this file once a rank; yours to edit.

swarmtrain deploy examples/quickstart.yml                   on a Docker Swarm
python training_code.py examples/quickstart.yml             here, in one process
torchrun --nproc-per-node 2 training_code.py examples/quickstart.yml
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel

import datautils
from swarmtrain.trainer import Optimizer, Samples, Transformer, parallelize, runtime, train


class Options(BaseModel, extra="forbid"):
    """The config's `script` key: this file's own options."""

    dataset: Literal["files", "python_sources"] = "files"
    """files: data_prefixes are there. python_sources: datautils makes them, one for training and one held out."""


def main() -> None:
    config = runtime.read_config(sys.argv[1:])
    options = Options.model_validate(config.script)
    shape, seed = config.transformer_architecture, config.trainer.seed
    facts = {}
    with runtime.start(config) as here:
        if options.dataset == "python_sources":
            sources = config.data.data_prefixes[0], config.data.validation_data_prefixes[0]
            with here.local_first():
                datautils.python_sources(*sources)
            if here.first:
                facts["baseline"] = datautils.bigram_loss(*sources)
        data = Samples(config.data.data_prefixes, shape.sequence_length, shape.vocab_size, seed)
        held_out = Samples(config.data.validation_data_prefixes, shape.sequence_length, shape.vocab_size, seed)
        model = parallelize(Transformer(shape, seed), here)
        optimizer = Optimizer(model, config)
        result = train(here, model, optimizer, data, held_out, facts=facts)
        if here.first:
            baseline = f"; a byte-bigram table: {facts['baseline']:.2f}" if facts else ""
            print(f"held-out loss {result.loss_before:.2f} → {result.loss_after:.2f} nats per byte{baseline}", flush=True)  # noqa: T201  # the one line a person waits for


if __name__ == "__main__":
    main()
