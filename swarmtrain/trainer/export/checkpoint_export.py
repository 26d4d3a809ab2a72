"""Export of a checkpoint as a Hugging Face folder: config.json and safetensors files, with only one tensor at a time in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.huggingface_config import build_config_json, find_model_family
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.config.user_files import describe_os_error, read_regular_file
from swarmtrain.errors import CheckpointError, TrainingError
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.checkpoint.consolidated import ConsolidatedCheckpoint
from swarmtrain.trainer.export import sentence_transformers
from swarmtrain.trainer.huggingface import safetensors
from swarmtrain.trainer.huggingface.tensor_names import TensorMapping
from swarmtrain.trainer.inference import model_source
from swarmtrain.trainer.model.peft import LORA_KEY, is_peft_parameter, merge_lora_weight
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.progress import ProgressBar

_TOKENIZER_FILE, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_TOKENIZER_FILES = (
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_LENGTH_KEY = "max_position_embeddings"


def export_checkpoint(
    source: Path, output: Path, *, dtype: str | None, shard_bytes: int, tokenizer: Path | None = None, base_model: Path | None = None
) -> dict[str, Any]:
    """Export the checkpoint `source`, or the newest complete checkpoint in the save_dir `source`, to the folder `output`.

    `dtype`: dtype of the exported tensors; None: the dtype in the checkpoint. `shard_bytes`: maximum size of the tensors in a file, unless
    a single tensor is larger. `tokenizer`: path of a tokenizer.json or of its folder, which is copied with its sidecar files; None: that
    of the base model, if it has one. `base_model`: folder of the base model, if it was moved. LoRA weights are merged into their layers.
    For an embedding model, the module files of sentence-transformers are also written.

    Return a report with checkpoint, step, model family, number of parameters and files. Raises CheckpointError if there is no checkpoint,
    if it is corrupt, or if `output` exists or cannot be written; SwarmtrainError if no model family matches the architecture.
    """
    tokenizer_files = _find_tokenizer_files(tokenizer) if tokenizer else []
    checkpoint = consolidated.find_checkpoint(source, base_model)
    base_folder = base_model or checkpoint.config.trainer.init_from
    if tokenizer is None and base_folder and (base_folder / _TOKENIZER_FILE).is_file():
        tokenizer = base_folder / _TOKENIZER_FILE
        tokenizer_files = _find_tokenizer_files(tokenizer)
    architecture = checkpoint.config.transformer_architecture
    model_family = find_model_family(architecture)
    sizes = {name: parameter.shape for name, parameter in Transformer(architecture, 0).named_parameters() if not is_peft_parameter(name)}
    export_dtype = safetensors.parse_dtype(dtype) or checkpoint.find_parameter_dtype(next(iter(sizes)))
    mapping = TensorMapping(model_family, architecture, sizes)
    specs = {
        huggingface_name: safetensors.TensorSpec(export_dtype, mapping.compute_tensor_shape(huggingface_name))
        for huggingface_name in mapping.sources
    }
    files = _split_tensors_into_files(specs, shard_bytes)
    progress_bar = ProgressBar("", sum(spec.nbytes for spec in specs.values()), verb="writing")

    def build_tensor(huggingface_name: str) -> Tensor:
        progress_bar.print_if_due()
        progress_bar.update(specs[huggingface_name].nbytes, 0)
        return mapping.fuse_parameters(
            huggingface_name, [_load_merged_parameter(checkpoint, name, sizes[name]) for name in mapping.sources[huggingface_name]]
        )

    with write_folder_atomically(output) as staging:
        config_json = build_config_json(architecture, str(export_dtype).removeprefix("torch."))
        if _LENGTH_KEY in config_json and base_folder:  # training on shorter samples does not change what the model supports
            config_json[_LENGTH_KEY] = max(config_json[_LENGTH_KEY], _read_base_length(base_folder))
        if stop_tokens := _find_stop_tokens(checkpoint.config, tokenizer):
            generation_config = {"eos_token_id": stop_tokens if len(stop_tokens) > 1 else stop_tokens[0]}
            config_json |= generation_config
            (staging / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")
        (staging / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")
        for tokenizer_file in tokenizer_files:
            shutil.copyfile(tokenizer_file, staging / tokenizer_file.name)
        if tokenizer_files and not (staging / _TOKENIZER_CONFIG).exists():
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_choose_pad_token(tokenizer_files[0], architecture)}
            (staging / _TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        if architecture.embedding_head_config:
            sentence_transformers.write_modules(staging, checkpoint, architecture.embedding_head_config)
        for file, file_specs in files.items():
            safetensors.write_tensors(staging / file, file_specs, build_tensor)
        progress_bar.close()
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
                "weight_map": {name: file for file, file_specs in files.items() for name in file_specs},
            }
            (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    parameters = sum(torch.Size(size).numel() for size in sizes.values())
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.manifest.step,
        "family": model_family.model_type,
        "parameters": parameters,
        "files": list(files),
    }


@contextmanager
def write_folder_atomically(output: Path) -> Iterator[Path]:
    """Context manager that yields a staging folder, which is renamed to `output` if the body succeeds, and removed otherwise.

    Raises CheckpointError if `output` exists or cannot be written.
    """
    if output.exists():
        raise CheckpointError("already exists", place=str(output), hint="choose another folder, or remove this one")
    staging = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
        staging.mkdir(parents=True)
        try:
            yield staging
            staging.rename(output)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        hint = "the incomplete output was removed; choose a writable folder with enough space"
        raise CheckpointError(f"cannot be written: {describe_os_error(error)}", place=str(output), hint=hint) from None


def _load_merged_parameter(checkpoint: ConsolidatedCheckpoint, name: str, size: torch.Size) -> Tensor:
    """Return the full parameter `name`, with shape `size`, after merging its LoRA weights, if it has any."""
    weight, config = checkpoint.load_parameter(name, size), checkpoint.config.transformer_architecture.lora_config
    parent, _, layer = name.removesuffix(".weight").rpartition(".")
    if config is None or layer not in config.layers or name.endswith(".bias"):
        return weight
    (outputs, inputs), lora_name = size, f"{parent}{LORA_KEY}{layer}"
    lora_a = checkpoint.load_parameter(f"{lora_name}.a.weight", (config.rank, inputs))
    return merge_lora_weight(weight, lora_a, checkpoint.load_parameter(f"{lora_name}.b.weight", (outputs, config.rank)), config)


def _find_tokenizer_files(path: Path) -> list[Path]:
    """Return the paths of a tokenizer.json and its sidecar files. Raises CheckpointError if `path` is not a tokenizer.json."""
    path = path / _TOKENIZER_FILE if path.is_dir() else path
    try:
        json.loads(read_regular_file(path))["model"]
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {describe_os_error(error)}", place=str(path), hint="pass a tokenizer.json with --tokenizer"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise CheckpointError("is not a valid tokenizer", place=str(path), hint="pass a tokenizer.json with --tokenizer") from None
    return [path, *(file for name in _TOKENIZER_FILES if (file := path.with_name(name)).exists())]


def _read_base_length(folder: Path) -> int:
    """Return the maximum sequence length of the Hugging Face model in `folder`; 0 if there is none."""
    try:
        return int(json.loads(read_regular_file(folder / "config.json")).get(_LENGTH_KEY) or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def _find_stop_tokens(config: Config, tokenizer: Path | None) -> list[int]:
    """Return the tokens that end a text of the model: those of its data and its base model, and the EOS token of the exported tokenizer."""
    tokens = model_source.read_stop_tokens(config)
    if tokenizer:
        with suppress(TrainingError):  # without the package `tokenizers`, or with a tokenizer that it cannot read
            tokens |= tokenizer_backends.find_eos_token_ids(tokenizer_backends.open_tokenizer(str(tokenizer)))
    return sorted(token for token in tokens if token < config.transformer_architecture.vocab_size)


def _choose_pad_token(tokenizer: Path, architecture: TransformerArchitectureConfig) -> dict[str, str]:
    """Return {"pad_token": TOKEN} for an embedding model, whose texts are padded in a batch; empty for other models.

    Any token is suitable as padding: texts are padded at the end, and with causal attention no token attends to later tokens.
    """
    special_tokens = [
        token["content"] for token in json.loads(read_regular_file(tokenizer)).get("added_tokens", ()) if token.get("special")
    ]
    return {"pad_token": special_tokens[0]} if special_tokens and architecture.embedding_head_config else {}


def _split_tensors_into_files(specs: Mapping[str, safetensors.TensorSpec], max_bytes: int) -> dict[str, dict[str, safetensors.TensorSpec]]:
    """Assign tensors to files, and return the tensors of each file by file name. `max_bytes`: maximum size of the tensors in a file."""
    files: list[dict[str, safetensors.TensorSpec]] = [{}]
    for name, spec in specs.items():
        if files[-1] and sum(file_spec.nbytes for file_spec in files[-1].values()) + spec.nbytes > max_bytes:
            files.append({})
        files[-1][name] = spec
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": file_specs for number, file_specs in enumerate(files, 1)}
