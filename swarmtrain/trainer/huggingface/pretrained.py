"""What parameters begin with where trainer.init_from names a model: a view of its files, of which each rank reads its part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config.huggingface import architecture, family
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError, ForeignCheckpoint, SwarmtrainError
from swarmtrain.trainer.huggingface import safetensors
from swarmtrain.trainer.huggingface.names import grouped, part

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_SHOWN = 4
_ELSEWHERE = ("sequence_length", "precision", "dropout", "fp8", "reset", "umup", "mlp_factor", "attention_output_bias")
"""Beginnings of fields that may differ: what the parameters are is the same, or is compared otherwise."""


def load(folder: Path, shape: TransformerArchitectureConfig, sizes: Mapping[str, torch.Size]) -> Callable[[str, torch.Size], Tensor]:
    """Return what gives the whole of a parameter by its name: a view of the files in `folder`, in their numbers.

    Raises ForeignCheckpoint if the model there is another, with what differs; CheckpointError if it cannot be read.
    """
    try:
        there = architecture(_json(folder / _CONFIG), str(folder / _CONFIG))
        if different := _differences(there, shape):
            raise ForeignCheckpoint(
                f"is another model: {'; '.join(different)}",
                place=f"config trainer.init_from {folder}",
                hint="make transformer_architecture what it is there",
            )
        kind = family(shape)
    except CheckpointError:
        raise
    except SwarmtrainError as error:
        raise ForeignCheckpoint(error.message, place=error.place, hint=error.hint) from None
    found, made_of = _tensors(folder), grouped(sizes, kind)
    wanted = {theirs: (sum(sizes[name][0] for name in ours), *sizes[ours[0]][1:]) for theirs, ours in made_of.items()}
    _check(folder, {name: tuple(tensor.shape) for name, tensor in found.items()}, wanted, tied=shape.weight_tying)
    place = {name: (theirs, number, len(ours)) for theirs, ours in made_of.items() for number, name in enumerate(ours)}

    def value(name: str, size: torch.Size) -> Tensor:
        theirs, number, of = place[name]
        return part(found[theirs], number, of, shape)

    return value


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files in `folder`. Raises CheckpointError."""
    if (folder / _INDEX).exists():
        index = _json(folder / _INDEX).get("weight_map")
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
    return {name: tensor for file in files for name, tensor in safetensors.read(folder / file).items()}


def _differences(there: Mapping[str, Any], shape: TransformerArchitectureConfig) -> list[str]:
    """Return what of the model is otherwise there, side by side."""
    other = TransformerArchitectureConfig.model_validate_json(json.dumps(there))
    pairs = {name: (getattr(other, name), getattr(shape, name)) for name in type(shape).model_fields if not name.startswith(_ELSEWHERE)}
    pairs |= {
        "attention_num_kv_heads": (other.kv_heads, shape.kv_heads),
        "attention_output_bias": (other.output_bias, shape.output_bias),
        "mlp_factor x hidden_size": (other.mlp_width, shape.mlp_width),
    }
    return [f"{name} is {one} there and {mine} here" for name, (one, mine) in pairs.items() if one != mine]


def _check(folder: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Raise ForeignCheckpoint if the tensors there are not those that are wanted."""
    # A tied head is the embedding again; the others are computed, not learned.
    beside = {"lm_head.weight", "embed_out.weight"} if tied else set()
    extra = {name for name in found.keys() - wanted.keys() - beside if not name.endswith(("inv_freq", "attention.bias", "masked_bias"))}
    missing = wanted.keys() - found.keys()
    different = [f"{name} is missing" for name in sorted(missing)] + [f"{name} has no place here" for name in sorted(extra)]
    different += [
        f"{name} is {found[name]} there and {size} here" for name, size in wanted.items() if name in found and found[name] != size
    ]
    if different:
        more = f"; {len(different)} in all" if len(different) > _SHOWN else ""
        raise ForeignCheckpoint(
            f"has other tensors than its {_CONFIG} says: {'; '.join(different[:_SHOWN])}{more}",
            place=f"config trainer.init_from {folder}",
            hint="is the folder whole?",
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", place=str(path), hint="is it mounted here?") from None
    except ValueError as error:
        raise CheckpointError(f"is no JSON: {error}", place=str(path)) from None
    if not isinstance(values, dict):
        raise CheckpointError("is no mapping", place=str(path))
    return values
