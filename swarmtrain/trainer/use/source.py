"""A model to be used: a run's newest checkpoint, a checkpoint, or a folder as Hugging Face has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarmtrain.config import Config, huggingface
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError, TrainingError
from swarmtrain.trainer.checkpoint import whole
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.prepare.options import BYTES

_BYTES = 257
"""Tokens of a vocabulary of bytes and one more for the end."""


@dataclass(frozen=True)
class Source:
    """A model: its shape, and the whole of each parameter by name and size."""

    place: Path
    step: int | None
    """Optimizer steps that it was trained for; None if that is not known."""
    shape: TransformerArchitectureConfig
    value: Callable[[str, torch.Size], Tensor]
    tokenizers: tuple[str, ...]
    """What may be its tokenizer, the likeliest first: paths, or BYTES."""
    end: int | None = None
    """The token after each text that it was trained on; None if there was none, or it is not known."""

    def encoder(self, name: str | None) -> Encoder:
        """Return the tokenizer `name`, or else its own. Raises TrainingError if there is none, or it is of another vocabulary."""
        return encoder((name,) if name else self.tokenizers, self.shape, str(self.place), "--tokenizer")


def encoder(names: Sequence[str], shape: TransformerArchitectureConfig, place: str, option: str) -> Encoder:
    """Return the first of `names`, tokenizers, which is told by `option`, for the model at `place`.

    Raises TrainingError if there is none, or it is of another vocabulary.
    """
    if not names:
        raise TrainingError("does not say how its tokens were made", place=place, hint=f"{option} names its tokenizer.json")
    found = encoders.opened(names[0])
    if found.size > shape.vocab_size:
        reason = f"has {found.size} tokens, and the model has {shape.vocab_size}"
        raise TrainingError(reason, place=f"tokenizer {found.name}", hint=f"{option} names the one that its data was made with")
    return found


def opened(path: Path, base: Path | None = None) -> Source:
    """Return the model at `path`. `base`: where the one is that it stands beside, if it has moved.

    Raises CheckpointError if there is none, or it cannot be read.
    """
    if (path / pretrained.CONFIG).exists():
        shape = huggingface.architecture(pretrained.read_json(path / pretrained.CONFIG), str(path / pretrained.CONFIG))
        sizes = {name: parameter.shape for name, parameter in Transformer(shape, 0).named_parameters()}
        beside = path / "tokenizer.json"
        names = (str(beside),) if beside.exists() else _of_bytes(shape)
        return Source(path, None, shape, pretrained.load(path, shape, sizes), names)
    if not path.is_dir():
        raise CheckpointError("is no folder", place=str(path), hint="name a run's save_dir, a checkpoint, or a folder with a config.json")
    found = whole.find(path, base)
    config = found.config
    return Source(found.path, found.content.step, config.transformer_architecture, found.parameter, tokenizers(config), _end(config))


def tokenizers(config: Config) -> tuple[str, ...]:
    """Return what may be the tokenizer of a config's data, the likeliest first: paths, or BYTES."""
    told = [name for prefix in config.data.data_prefixes if (name := _prepared_with(prefix))]
    return (*told, *_of_bytes(config.transformer_architecture))


def _end(config: Config) -> int | None:
    for prefix in config.data.data_prefixes[:1]:
        with suppress(OSError, ValueError, LookupError, TypeError):
            token = json.loads(formats.path(prefix, "meta.json").read_text())["prepared"]["end_token"]
            return None if token is None else int(token)
    return None


def _of_bytes(shape: TransformerArchitectureConfig) -> tuple[str, ...]:
    return (BYTES,) if shape.vocab_size <= _BYTES else ()


def _prepared_with(prefix: Path) -> str | None:
    """Return the tokenizer that `data prepare` used for token files, if they say so and it is still what it was."""
    try:
        known = json.loads(formats.path(prefix, "meta.json").read_text())["prepared"]["tokenizer"]
        return str(known["name"]) if encoders.opened(known["name"]).sha256 == known["sha256"] else None
    except (OSError, ValueError, LookupError, TypeError, TrainingError):
        return None
