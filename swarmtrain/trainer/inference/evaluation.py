"""`python -m swarmtrain.trainer evaluate`: the command that `swarmtrain evaluate` starts on each rank."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.cli_exit import handle_cli_errors
from swarmtrain.trainer.data.samples import open_data
from swarmtrain.trainer.huggingface.pretrained import find_architecture_differences
from swarmtrain.trainer.inference import model_source
from swarmtrain.trainer.inference.parallel_model import open_parallel_model
from swarmtrain.trainer.loss_unit import find_loss_unit
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import start_runtime
from swarmtrain.trainer.step import count_validation_samples, evaluate_model
from swarmtrain.trainer.tokenize import tokenizer_check
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate

_MAX_EXP_NATS = 700.0
"""Loss in nats above which the perplexity may overflow."""


@handle_cli_errors
def main(options: Mapping[str, Any]) -> None:
    """Print a model's validation loss in nats, or its results on the benchmark tasks in `options`. Raises SwarmtrainError."""
    if options["tasks"]:
        _evaluate_tasks(options)
    else:
        _evaluate_validation_loss(options)


def _evaluate_tasks(options: Mapping[str, Any]) -> None:
    try:
        from swarmtrain.trainer.inference import lm_eval_harness
    except ImportError as error:
        place, hint = "--tasks", "pip install 'swarmtrain[tasks]'"
        raise TrainingError(f"{error.name} is not installed", place=place, hint=hint) from None
    config = Config.from_json(options["config"])
    model = model_source.open_model(_resolve_model_folder(options, config), config.trainer.init_from)
    tokenizer = model.open_tokenizer(options["tokenizer"])
    with open_parallel_model(model) as (parallel_model, runtime):
        task_folder = Path(options["task_files"]) if options["task_files"] else None
        template = ChatTemplate(tokenizer, source=model.chat_template) if options["apply_chat_template"] else None
        begin_tokens = model.get_begin_tokens(tokenizer)
        harness_model = lm_eval_harness.HarnessModel(
            parallel_model, tokenizer, options["batch_size"], stop_tokens=model.stop_tokens, begin_tokens=begin_tokens, template=template
        )
        results = lm_eval_harness.run_tasks(
            harness_model, options["tasks"], num_fewshot=options["num_fewshot"], limit=options["limit"], task_folder=task_folder
        )
        if runtime.is_rank_zero:
            report = {"model": str(model.path), "step": model.step, "results": results["results"]}
            sys.stdout.write(f"{json.dumps(report) if options['json'] else lm_eval_harness.format_results_table(results)}\n")


def _resolve_model_folder(options: Mapping[str, Any], config: Config) -> Path:
    folder = options["model"] or config.trainer.save_dir
    if folder is None:
        raise TrainingError(
            "is not set, so there is no model to evaluate",
            place="config trainer.save_dir",
            hint="pass the model's folder with --model FOLDER",
        )
    return Path(folder)


def _evaluate_validation_loss(options: Mapping[str, Any]) -> None:
    config = Config.from_json(options["config"])
    model, architecture = (
        model_source.open_model(_resolve_model_folder(options, config), config.trainer.init_from),
        config.transformer_architecture,
    )
    mismatches = find_architecture_differences(model.architecture, architecture)
    adapter_fields = [
        (name, getattr(model.architecture, name), getattr(architecture, name))
        for name in sorted({*model.architecture.peft_fields, *architecture.peft_fields})
    ]
    mismatches += [
        f"{name} is {loaded} in the checkpoint and {configured} in the config"
        for name, loaded, configured in adapter_fields
        if loaded != configured
    ]
    if mismatches:
        raise IncompatibleCheckpoint(
            f"is a different model from the config's: {'; '.join(mismatches)}",
            place=str(model.path),
            hint="pass the config that it was trained with",
        )
    # Clear `init_from`: the loaded model is evaluated, not the base model from which a training run is initialized. It has no learners, so
    # any number of ranks can evaluate it.
    trainer, topology = config.trainer.model_copy(update={"init_from": None}), config.topology.model_copy(update={"learners": None})
    with start_runtime(config.model_copy(update={"trainer": trainer, "topology": topology})) as runtime:
        _, data = open_data(config)
        if data is None:
            raise TrainingError("there is no validation data", place="config data", hint="set data.validation_data_prefixes")
        validation_files = data.all_token_files
        collectives.run_on_rank_zero(lambda: tokenizer_check.check_tokenizers(config, validation_files, model.path))
        transformer = Transformer(architecture, 0)
        transformer.initial_values = LoadedParameters(model.load_parameter)
        validation = evaluate_model(runtime, parallelize(transformer, runtime), data, None)
        objective = transformer.objective
        if validation is None or not validation.loss < _MAX_EXP_NATS:
            loss = validation.loss if validation else None
            raise TrainingError(
                f"the validation loss is NaN/Inf or too large: {loss}", place=str(model.path), hint="try an earlier checkpoint"
            )
        if runtime.is_rank_zero:
            samples = count_validation_samples(config, data)
            report = {"model": str(model.path), "step": model.step, "loss": validation.loss, "samples": samples}
            loss_unit = find_loss_unit(objective, data)
            if loss_unit == "byte":
                report["bits_per_byte"] = validation.loss / math.log(2)
            if objective.has_perplexity:
                report["perplexity"] = math.exp(validation.loss)
            if validation.accuracy is not None:
                report["accuracy"] = validation.accuracy
            sys.stdout.write(f"{json.dumps(report) if options['json'] else _format_validation_result(report, loss_unit)}\n")


def _format_validation_result(report: Mapping[str, Any], loss_unit: str) -> str:
    step = "" if report["step"] is None else f" at step {report['step']}"
    units = f"nats per {loss_unit}" + (f", {report['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in report else "")
    units += f", perplexity {report['perplexity']:.2f}" if "perplexity" in report else ""
    units += f", accuracy {report['accuracy']:.1%}" if "accuracy" in report else ""
    loss = f"validation loss {report['loss']:.4f} {units}"
    return f"{report['model']}{step}: {loss}, over {report['samples']} samples"
