"""Load initial parameters from the Hugging Face model in the folder trainer.init_from.

The model's files are memory-mapped, so that each rank reads only its shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config import huggingface_config
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint, SwarmtrainError
from swarmtrain.trainer.huggingface import safetensors
from swarmtrain.trainer.huggingface.tensor_names import TensorMapping, exclude_buffer_names

CONFIG_FILE, _INDEX_FILE, _SINGLE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
_MAX_SHOWN_DIFFERENCES = 4
_UNCOMPARED_PREFIXES = (
    "sequence_length",
    "precision",
    "dropout",
    "fp8",
    "reset",
    "umup",
    "lora",
    "adapter",
    "embedding_head",
    "mlp_factor",
    "attention_output_bias",
)
"""Prefixes of architecture fields that are not compared, since they do not affect the parameters or are compared separately."""


def build_parameter_loader(
    folder: Path, architecture: TransformerArchitectureConfig, parameter_shapes: Mapping[str, torch.Size]
) -> Callable[[str, torch.Size], Tensor]:
    """Return a function that loads full parameters by name: views of the files in `folder`, in the dtype of the files.

    `parameter_shapes`: shapes of the model's parameters, by name. Raises IncompatibleCheckpoint, with a list of differences, if the model
    in `folder` has another architecture; CheckpointError if it cannot be read.
    """
    try:
        values, place = read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE)
        loaded_architecture = huggingface_config.read_architecture(values, place)
        if mismatches := find_architecture_differences(loaded_architecture, architecture):
            raise IncompatibleCheckpoint(
                f"is a different model: {'; '.join(mismatches)}",
                place=f"config trainer.init_from {folder}",
                hint=f"copy transformer_architecture from the output of: swarmtrain import {place}",
            )
        mapping = TensorMapping(huggingface_config.read_model_family(values, place), architecture, parameter_shapes)
    except CheckpointError:
        raise
    except SwarmtrainError as error:
        raise IncompatibleCheckpoint(error.message, place=error.place, hint=error.hint) from None
    tensors = _add_base_model_prefix(_read_tensors(folder), mapping.base_model_prefix)
    _check_tensor_names_and_shapes(
        folder, tensors, mapping, headless=architecture.has_tied_embeddings or architecture.embedding_head_config is not None
    )
    if architecture.has_tied_embeddings and architecture.embedding_head_config is None:
        _check_tied_head(folder, tensors, mapping)
    return lambda name, _: mapping.extract_parameter(name, tensors)


def compute_model_fingerprint(folder: Path) -> str:
    """Return a fingerprint of the model in `folder`: SHA-256 of the config, and of the header, size and last bytes of each tensor file."""
    digest = hashlib.sha256(read_regular_file(folder / CONFIG_FILE))
    for path in _find_safetensors_files(folder):
        digest.update(safetensors.read_fingerprint_bytes(path))
    return digest.hexdigest()


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in all files in `folder`, by name. Raises CheckpointError if a file cannot be read."""
    return {name: tensor for path in _find_safetensors_files(folder) for name, tensor in safetensors.read_tensors(path).items()}


def _find_safetensors_files(folder: Path) -> list[Path]:
    """Return the paths of the safetensors files in `folder`. Raises CheckpointError if there are none."""
    if (folder / _INDEX_FILE).exists():
        index = read_json(folder / _INDEX_FILE).get("weight_map")
        if not isinstance(index, dict):
            raise CheckpointError("has no weight_map", place=str(folder / _INDEX_FILE))
        files = sorted({Path(str(file)).name for file in index.values()})
    elif (folder / _SINGLE_FILE).exists():
        files = [_SINGLE_FILE]
    else:
        pickles = any(folder.glob("*.bin"))
        raise CheckpointError(
            "has only pickle files, which can execute code when loaded" if pickles else f"has no {_SINGLE_FILE}",
            place=f"config trainer.init_from {folder}",
            hint="save it as safetensors, with save_pretrained of transformers"
            if pickles
            else "check that it is mounted on this machine and complete",
        )
    return [folder / file for file in files]


def _add_base_model_prefix(tensors: Mapping[str, Tensor], base_prefix: str) -> Mapping[str, Tensor]:
    """Return the tensors with `base_prefix` added to names that lack it, as in the files of a model without a head."""
    return (
        tensors
        if any(name.startswith(base_prefix) for name in tensors)
        else {f"{base_prefix}{name}": tensor for name, tensor in tensors.items()}
    )


def find_architecture_differences(
    loaded_architecture: TransformerArchitectureConfig, architecture: TransformerArchitectureConfig
) -> list[str]:
    """Return a description of each difference between two architectures, with both values."""
    pairs = {
        name: (getattr(loaded_architecture, name), getattr(architecture, name))
        for name in type(architecture).model_fields
        if not name.startswith(_UNCOMPARED_PREFIXES)
    }
    pairs |= {
        "attention_head_size": (loaded_architecture.head_size, architecture.head_size),
        "attention_num_kv_heads": (loaded_architecture.kv_heads, architecture.kv_heads),
        "attention_output_bias": (loaded_architecture.has_attention_output_bias, architecture.has_attention_output_bias),
        "umup.enable": (loaded_architecture.umup.enable, architecture.umup.enable),
        "mlp_factor x hidden_size": (loaded_architecture.mlp_width, architecture.mlp_width),
    }
    return [
        f"{name} is {loaded} in the checkpoint and {configured} in the config"
        for name, (loaded, configured) in pairs.items()
        if loaded != configured
    ]


def _check_tensor_names_and_shapes(folder: Path, tensors: Mapping[str, Tensor], mapping: TensorMapping, *, headless: bool) -> None:
    """Raise IncompatibleCheckpoint if names or shapes of the tensors differ from those that the mapping expects.

    `headless`: whether the tensor of the language model head is optional.
    """
    expected = {huggingface_name: mapping.compute_tensor_shape(huggingface_name) for huggingface_name in mapping.sources}
    extra = set(exclude_buffer_names(tensors)) - expected.keys() - ({mapping.head_name} if headless else set())
    mismatches = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    mismatches += [f"{name} is unexpected" for name in sorted(extra)]
    sizes = [(name, tuple(tensors[name].shape), size) for name, size in expected.items() if name in tensors]
    positions_name = mapping.position_embeddings_name  # a model with shorter samples uses only the first positions
    mismatches += [
        f"{name} is {found_size} in the checkpoint and {size} in the model"
        for name, found_size, size in sizes
        if found_size != size and not (name == positions_name and found_size[0] > size[0] and found_size[1:] == size[1:])
    ]
    if mismatches:
        more = f"; {len(mismatches)} in all" if len(mismatches) > _MAX_SHOWN_DIFFERENCES else ""
        raise IncompatibleCheckpoint(
            f"does not have the tensors that its {CONFIG_FILE} requires: {'; '.join(mismatches[:_MAX_SHOWN_DIFFERENCES])}{more}",
            place=f"config trainer.init_from {folder}",
            hint="check that the folder is complete",
        )


def _check_tied_head(folder: Path, tensors: Mapping[str, Tensor], mapping: TensorMapping) -> None:
    """Raise IncompatibleCheckpoint if a model with tied embeddings has a language model head of its own, which transformers would use."""
    head, embeddings = tensors.get(mapping.head_name), tensors.get(mapping.embeddings_name)
    if head is not None and embeddings is not None and not torch.equal(head, embeddings):
        raise IncompatibleCheckpoint(
            f"has tied embeddings according to its {CONFIG_FILE}, but its {mapping.head_name} is another one than its embeddings",
            place=f"config trainer.init_from {folder}",
            hint=f"set tie_word_embeddings: false in {folder / CONFIG_FILE}, and transformer_architecture.weight_tying: false",
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`. Raises CheckpointError if it cannot be read."""
    try:
        values = json.loads(read_regular_file(path))
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror}", place=str(path), hint="check that it is mounted on this machine"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"is not JSON: {error}", place=str(path)) from None
    if not isinstance(values, dict):
        raise CheckpointError("is not a JSON object", place=str(path))
    return values
