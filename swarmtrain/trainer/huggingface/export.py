"""A checkpoint as a folder of Hugging Face's: config.json and safetensors, of which one tensor at a time is in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config.files import reason
from swarmtrain.config.huggingface import described, family
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import whole
from swarmtrain.trainer.checkpoint.whole import Whole
from swarmtrain.trainer.huggingface import safetensors, sentences
from swarmtrain.trainer.huggingface.names import Tensors
from swarmtrain.trainer.model.beside import LORA, is_beside
from swarmtrain.trainer.model.lora import merged
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.prepare.progress import Progress

_SETTINGS = "tokenizer_config.json"
_BESIDE = (_SETTINGS, "special_tokens_map.json", "chat_template.jinja")


def export(
    source: Path, output: Path, *, dtype: str | None, shard_bytes: int, tokenizer: Path | None = None, base: Path | None = None
) -> dict[str, Any]:
    """Write the checkpoint `source`, or the newest whole one of the run's folder `source`, as the folder `output`.

    Its tensors are as they are in the checkpoint, or `dtype`; a file has at most `shard_bytes` of them, or one. `tokenizer`, a
    tokenizer.json, and what lies beside it for one, is copied. What LoRA has learned is merged into the layers that it is beside.
    A model that makes vectors has beside it what sentence-transformers make them by.
    `base`: where the model is that it stands beside, if it has moved.
    Return step, family, number of parameters and files. Raises CheckpointError if there is no checkpoint, or it is damaged, or
    `output` is there already or cannot be written; SwarmtrainError if no family of models is like this one.
    """
    copied = _tokenizer(tokenizer) if tokenizer else []
    checkpoint = whole.find(source, base)
    shape = checkpoint.config.transformer_architecture
    kind = family(shape)
    sizes = {name: parameter.shape for name, parameter in Transformer(shape, 0).named_parameters() if not is_beside(name)}
    kept = safetensors.dtype(dtype) or checkpoint.dtype(next(iter(sizes)))
    tensors = Tensors(kind, shape, sizes)
    kinds = {theirs: safetensors.Kind(kept, tensors.size(theirs)) for theirs in tensors.made_of}
    files = _divided(kinds, shard_bytes)
    progress = Progress("", sum(one.nbytes for one in kinds.values()), verb="writing")

    def made(theirs: str) -> Tensor:
        progress.tell()
        progress.add(kinds[theirs].nbytes, 0)
        return tensors.join(theirs, [_merged(checkpoint, name, sizes[name]) for name in tensors.made_of[theirs]])

    with written(output) as aside:
        (aside / "config.json").write_text(json.dumps(described(shape, str(kept).removeprefix("torch.")), indent=2) + "\n")
        for each in copied:
            shutil.copyfile(each, aside / each.name)
        if copied and not (aside / _SETTINGS).exists():
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_filling(copied[0], shape)}
            (aside / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        if shape.embedding_head_config:
            sentences.write(aside, checkpoint, shape.embedding_head_config)
        for file, part in files.items():
            safetensors.write(aside / file, part, made)
        progress.end()
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(one.nbytes for one in kinds.values())},
                "weight_map": {name: file for file, part in files.items() for name in part},
            }
            (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    parameters = sum(torch.Size(size).numel() for size in sizes.values())
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.content.step,
        "family": kind.name,
        "parameters": parameters,
        "files": list(files),
    }


@contextmanager
def written(output: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `output` when it is whole, and is removed if it does not get so far. Raises CheckpointError."""
    if output.exists():
        raise CheckpointError("is there already", place=str(output), hint="name another folder, or remove it")
    aside = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
        aside.mkdir(parents=True)
        try:
            yield aside
            aside.rename(output)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        hint = "nothing of it is left; name a folder that can be written and has room"
        raise CheckpointError(f"cannot be written: {reason(error)}", place=str(output), hint=hint) from None


def _merged(checkpoint: Whole, name: str, size: torch.Size) -> Tensor:
    """Return a parameter with what LoRA has learned beside it."""
    weight, config = checkpoint.parameter(name, size), checkpoint.config.transformer_architecture.lora_config
    around, _, last = name.removesuffix(".weight").rpartition(".")
    if config is None or last not in config.layers or name.endswith(".bias"):
        return weight
    (outputs, inputs), beside = size, f"{around}{LORA}{last}"
    a = checkpoint.parameter(f"{beside}.a.weight", (config.rank, inputs))
    return merged(weight, a, checkpoint.parameter(f"{beside}.b.weight", (outputs, config.rank)), config)


def _tokenizer(path: Path) -> list[Path]:
    """Return the files of a tokenizer. Raises CheckpointError if it is none."""
    try:
        json.loads(path.read_text())["model"]
    except OSError as error:
        raise CheckpointError(f"cannot be read: {reason(error)}", place=str(path), hint="--tokenizer names a tokenizer.json") from None
    except (ValueError, LookupError, TypeError):
        raise CheckpointError("is no tokenizer", place=str(path), hint="--tokenizer names a tokenizer.json") from None
    return [path, *(each for name in _BESIDE if (each := path.with_name(name)).exists())]


def _filling(tokenizer: Path, shape: TransformerArchitectureConfig) -> dict[str, str]:
    """Return what fills up short texts beside long ones, whose vectors are made together: any token, since none sees what is after it."""
    special = [token["content"] for token in json.loads(tokenizer.read_text()).get("added_tokens", ()) if token.get("special")]
    return {"pad_token": special[0]} if special and shape.embedding_head_config else {}


def _divided(kinds: Mapping[str, safetensors.Kind], most: int) -> dict[str, dict[str, safetensors.Kind]]:
    """Return the tensors of each file, by its name."""
    parts: list[dict[str, safetensors.Kind]] = [{}]
    for name, kind in kinds.items():
        if parts[-1] and sum(one.nbytes for one in parts[-1].values()) + kind.nbytes > most:
            parts.append({})
        parts[-1][name] = kind
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}
