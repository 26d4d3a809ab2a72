"""What parameters begin with where trainer.init_from names a model: a view of its files, of which each rank reads its part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config import huggingface
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError, ForeignCheckpoint, SwarmtrainError
from swarmtrain.trainer.huggingface import safetensors
from swarmtrain.trainer.huggingface.names import Tensors, parameters

CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_SHOWN = 4
_ELSEWHERE = (
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
"""Beginnings of fields that may differ: what the parameters are is the same, or is compared otherwise."""


def load(folder: Path, shape: TransformerArchitectureConfig, sizes: Mapping[str, torch.Size]) -> Callable[[str, torch.Size], Tensor]:
    """Return what gives the whole of a parameter by its name: a view of the files in `folder`, in their numbers.

    Raises ForeignCheckpoint if the model there is another, with what differs; CheckpointError if it cannot be read.
    """
    try:
        values, place = read_json(folder / CONFIG), str(folder / CONFIG)
        there = huggingface.architecture(values, place)
        if different := differences(there, shape):
            raise ForeignCheckpoint(
                f"is another model: {'; '.join(different)}",
                place=f"config trainer.init_from {folder}",
                hint=f"make transformer_architecture what it is there: swarmtrain import {place}",
            )
        tensors = Tensors(huggingface.known(values, place), shape, sizes)
    except CheckpointError:
        raise
    except SwarmtrainError as error:
        raise ForeignCheckpoint(error.message, place=error.place, hint=error.hint) from None
    found = _named(_tensors(folder), tensors.base)
    _check(folder, found, tensors, headless=shape.tied or shape.embedding_head_config is not None)
    return lambda name, _: tensors.part(name, found)


def fingerprint(folder: Path) -> str:
    """Return a digest of what `load` reads: all of its words, and of its numbers how many there are and the last of each file."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    for path in _files(folder):
        digest.update(safetensors.mark(path))
    return digest.hexdigest()


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files in `folder`. Raises CheckpointError."""
    return {name: tensor for path in _files(folder) for name, tensor in safetensors.read(path).items()}


def _files(folder: Path) -> list[Path]:
    """Return the files of the model in `folder`. Raises CheckpointError if there are none."""
    if (folder / _INDEX).exists():
        index = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise CheckpointError("has no weight_map", place=str(folder / _INDEX))
        files = sorted({Path(str(file)).name for file in index.values()})
    elif (folder / _SINGLE).exists():
        files = [_SINGLE]
    else:
        pickles = any(folder.glob("*.bin"))
        raise CheckpointError(
            "has pickles alone, which can run code when they are read" if pickles else f"has no {_SINGLE}",
            place=f"config trainer.init_from {folder}",
            hint="save it as safetensors: save_pretrained of transformers does" if pickles else "is it mounted here, and whole?",
        )
    return [folder / file for file in files]


def _named(found: Mapping[str, Tensor], base: str) -> Mapping[str, Tensor]:
    """Return the tensors by the names they have in a model with a head: one without has none of `base` in them."""
    return found if any(name.startswith(base) for name in found) else {f"{base}{name}": tensor for name, tensor in found.items()}


def differences(there: TransformerArchitectureConfig, shape: TransformerArchitectureConfig) -> list[str]:
    """Return what of the model is otherwise there, side by side."""
    pairs = {name: (getattr(there, name), getattr(shape, name)) for name in type(shape).model_fields if not name.startswith(_ELSEWHERE)}
    pairs |= {
        "attention_head_size": (there.head_size, shape.head_size),
        "attention_num_kv_heads": (there.kv_heads, shape.kv_heads),
        "attention_output_bias": (there.output_bias, shape.output_bias),
        "umup.enable": (there.umup.enable, shape.umup.enable),
        "mlp_factor x hidden_size": (there.mlp_width, shape.mlp_width),
    }
    return [f"{name} is {one} there and {mine} here" for name, (one, mine) in pairs.items() if one != mine]


def _check(folder: Path, found: Mapping[str, Tensor], tensors: Tensors, *, headless: bool) -> None:
    """Raise ForeignCheckpoint if the tensors there are not those that are wanted."""
    wanted = {theirs: tensors.size(theirs) for theirs in tensors.made_of}
    extra = set(parameters(found)) - wanted.keys() - ({tensors.head} if headless else set())
    different = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    different += [f"{name} has no place here" for name in sorted(extra)]
    sizes = [(name, tuple(found[name].shape), size) for name, size in wanted.items() if name in found]
    longer = tensors.positions  # of which samples have the first ones
    different += [
        f"{name} is {there} there and {size} here"
        for name, there, size in sizes
        if there != size and not (name == longer and there[0] > size[0] and there[1:] == size[1:])
    ]
    if different:
        more = f"; {len(different)} in all" if len(different) > _SHOWN else ""
        raise ForeignCheckpoint(
            f"has other tensors than its {CONFIG} says: {'; '.join(different[:_SHOWN])}{more}",
            place=f"config trainer.init_from {folder}",
            hint="is the folder whole?",
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file of JSON says. Raises CheckpointError."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", place=str(path), hint="is it mounted here?") from None
    except ValueError as error:
        raise CheckpointError(f"is no JSON: {error}", place=str(path)) from None
    if not isinstance(values, dict):
        raise CheckpointError("is no mapping", place=str(path))
    return values
