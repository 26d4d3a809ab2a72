"""`python -m swarmtrain.trainer evaluate OPTIONS`: what our own command line starts, once a rank; OPTIONS is JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import ForeignCheckpoint, TrainingError
from swarmtrain.trainer import runtime
from swarmtrain.trainer.data.samples import open_data
from swarmtrain.trainer.ending import verb
from swarmtrain.trainer.huggingface.pretrained import differences
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import parallelize
from swarmtrain.trainer.step import held_out_loss
from swarmtrain.trainer.use import source

_HIGHEST = 700.0
"""Nats, of which e to the power is still a number."""


@verb
def main(argv: Sequence[str]) -> None:
    """Write the held-out loss of a model. Raises SwarmtrainError."""
    asked = json.loads(argv[0])
    config = Config.from_json(asked["config"])
    place = asked["model"] or config.trainer.save_dir
    if place is None:
        raise TrainingError("there is no model", place="config trainer.save_dir", hint="name one: --model FOLDER")
    model, shape = source.opened(Path(place)), config.transformer_architecture
    if different := differences(model.shape, shape):
        raise ForeignCheckpoint(
            f"is another model than the config's: {'; '.join(different)}",
            place=str(model.place),
            hint="name the config that it was trained by",
        )
    with runtime.start(config) as here:
        _, data = open_data(config)
        if data is None:
            raise TrainingError("there is no held-out data", place="config data", hint="data.validation_data_prefixes names it")
        made = Transformer(shape, 0)
        made.initial = model.value
        loss = held_out_loss(here, parallelize(made, here), data, None)
        if here.first and loss is not None:
            samples = min(config.topology.global_batch * config.trainer.eval_iterations, len(data))
            if not loss < _HIGHEST:
                raise TrainingError(f"the held-out loss is {loss:g}", place=str(model.place), hint="the model is no good any more")
            facts = {"model": str(model.place), "step": model.step, "loss": loss, "perplexity": math.exp(loss), "samples": samples}
            sys.stdout.write(f"{json.dumps(facts) if asked['json'] else _line(facts)}\n")


def _line(facts: Mapping[str, Any]) -> str:
    step = "" if facts["step"] is None else f" at step {facts['step']}"
    loss = f"held-out loss {facts['loss']:.4f} nats per token, perplexity {facts['perplexity']:.2f}"
    return f"{facts['model']}{step}: {loss}, over {facts['samples']} samples"
