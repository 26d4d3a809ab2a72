"""`python -m swarmtrain.trainer evaluate`: what our own command line starts, once a rank."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
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
from swarmtrain.trainer.step import evaluate
from swarmtrain.trainer.use import source
from swarmtrain.trainer.use.shared import ready

_HIGHEST = 700.0
"""Nats, of which e to the power is still a number."""


@verb
def main(asked: Mapping[str, Any]) -> None:
    """Write the held-out loss of a model, or how it does under tasks. Raises SwarmtrainError."""
    if asked["tasks"]:
        _under_tasks(asked)
    else:
        _held_out(asked)


def _under_tasks(asked: Mapping[str, Any]) -> None:
    try:
        from swarmtrain.trainer.use import harness
    except ImportError as error:
        place, hint = "--tasks", "pip install 'swarmtrain[tasks]'"
        raise TrainingError(f"{error.name} is not installed", place=place, hint=hint) from None
    config = Config.from_json(asked["config"])
    model = source.opened(_place(asked, config), config.trainer.init_from)
    encoder = model.encoder(asked["tokenizer"])
    with ready(model) as (shared, here):
        folder = Path(asked["task_files"]) if asked["task_files"] else None
        judged = harness.Model(shared, encoder, asked["batch"])
        found = harness.results(judged, asked["tasks"], shots=asked["shots"], limit=asked["limit"], folder=folder)
        if here.first:
            facts = {"model": str(model.place), "step": model.step, "results": found["results"]}
            sys.stdout.write(f"{json.dumps(facts) if asked['json'] else harness.table(found)}\n")


def _place(asked: Mapping[str, Any], config: Config) -> Path:
    place = asked["model"] or config.trainer.save_dir
    if place is None:
        raise TrainingError("there is no model", place="config trainer.save_dir", hint="name one: --model FOLDER")
    return Path(place)


def _held_out(asked: Mapping[str, Any]) -> None:
    config = Config.from_json(asked["config"])
    model, shape = source.opened(_place(asked, config), config.trainer.init_from), config.transformer_architecture
    different = differences(model.shape, shape)
    beside = [(name, getattr(model.shape, name), getattr(shape, name)) for name in sorted({*model.shape.beside, *shape.beside})]
    different += [f"{name} is {one} there and {other} here" for name, one, other in beside if one != other]
    if different:
        raise ForeignCheckpoint(
            f"is another model than the config's: {'; '.join(different)}",
            place=str(model.place),
            hint="name the config that it was trained by",
        )
    # It is measured, not what a run would begin with.
    trainer = config.trainer.model_copy(update={"init_from": None})
    with runtime.start(config.model_copy(update={"trainer": trainer})) as here:
        _, data = open_data(config)
        if data is None:
            raise TrainingError("there is no held-out data", place="config data", hint="data.validation_data_prefixes names it")
        made = Transformer(shape, 0)
        made.initial = model.value
        measured = evaluate(here, parallelize(made, here), data, None)
        if measured is None or not measured.loss < _HIGHEST:
            told = measured.loss if measured else None
            raise TrainingError(f"the held-out loss is {told}", place=str(model.place), hint="an earlier checkpoint may be sound")
        if here.first:
            samples = min(config.topology.global_batch * config.trainer.eval_iterations, len(data))
            facts = {"model": str(model.place), "step": model.step, "loss": measured.loss, "samples": samples}
            unit = "query" if config.trainer.contrastive_config else "pair" if config.trainer.preference_config else "token"
            if unit == "token":
                facts["perplexity"] = math.exp(measured.loss)
            if measured.accuracy is not None:
                facts["accuracy"] = measured.accuracy
            sys.stdout.write(f"{json.dumps(facts) if asked['json'] else _line(facts, unit)}\n")


def _line(facts: Mapping[str, Any], unit: str) -> str:
    step = "" if facts["step"] is None else f" at step {facts['step']}"
    worth = f"nats per {unit}" + (f", perplexity {facts['perplexity']:.2f}" if "perplexity" in facts else "")
    worth += f", accuracy {facts['accuracy']:.1%}" if "accuracy" in facts else ""
    loss = f"held-out loss {facts['loss']:.4f} {worth}"
    return f"{facts['model']}{step}: {loss}, over {facts['samples']} samples"
