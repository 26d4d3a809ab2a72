"""A model's parameters, whole and one at a time: a checkpoint's, whatever the topology that saved them, or those of trainer.init_from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from swarmtrain.config import Config
from swarmtrain.config.transformer_architecture import Precision, TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError, ForeignCheckpoint
from swarmtrain.trainer.checkpoint import first_reason, manifest, stage
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage import DTYPES, Reader
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.model.beside import is_beside
from swarmtrain.trainer.model.transformer import Transformer

_MODEL = "model/"


@dataclass(frozen=True)
class Base:
    """The model that a run begins with."""

    value: Callable[[str, torch.Size], Tensor]
    """Gives the whole of a parameter by its name and size."""
    fingerprint: str
    """Of what it is made of."""


@dataclass(frozen=True)
class Whole:
    """A checkpoint that is whole."""

    path: Path
    content: Manifest
    beside: Path | None = None
    """Where the model is now that it stands beside, if that is not where its config has it."""

    @cached_property
    def config(self) -> Config:
        """What it was made by. Raises CheckpointError if it is none of this version's."""
        try:
            return Config.model_validate_json(json.dumps(self.content.config))
        except ValueError as error:
            reason = f"its config is none that this version has: {error}"
            raise CheckpointError(reason, place=str(self.path), hint="use the version that wrote it") from None

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a parameter's numbers. Raises CheckpointError if there is none of this name."""
        if _MODEL + name not in self.content.tensors:
            if self.content.base:
                return torch.float64 if self.config.transformer_architecture.precision is Precision.float64 else torch.float32
            raise CheckpointError(f"has no parameter {name}", place=str(self.path), hint="it is of another model")
        return DTYPES[self.content.tensors[_MODEL + name]["dtype"]]

    def parameter(self, name: str, size: torch.Size | tuple[int, ...]) -> Tensor:
        """Return parameter `name`, which has this size, on the CPU. Raises CheckpointError."""
        if self.content.base and _MODEL + name not in self.content.tensors:
            return self._rest.value(name, torch.Size(size)).to(self.dtype(name))
        values = {_MODEL + name: torch.empty(size, dtype=self.dtype(name))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this process alone reads, as it was asked to
            try:
                dcp.load(values, storage_reader=Reader(self.path, self.content.tensors), no_dist=True)
            except CheckpointException as error:  # a BaseException, so nobody else would catch it
                raise CheckpointError(first_reason(error), place=str(self.path)) from None
        return values[_MODEL + name]

    @cached_property
    def _rest(self) -> Base:
        """The model that has what is not here. Raises CheckpointError if it is not what it was."""
        shape, folder = self.config.transformer_architecture, self.beside or self.config.trainer.init_from
        sizes = {name: parameter.shape for name, parameter in Transformer(shape, 0).named_parameters() if not is_beside(name)}
        if folder is None or not folder.exists():
            reason = f"stands beside the model {folder}, which is not here"
            raise CheckpointError(reason, place=str(self.path), hint="--base names where that is")
        found = base(folder, shape, sizes)
        if found.fingerprint != self.content.base:
            reason = f"stands beside a model that {folder} is not, or not any more"
            raise CheckpointError(reason, place=str(self.path), hint="--base names where that is")
        return found


def base(folder: Path, shape: TransformerArchitectureConfig, sizes: Mapping[str, torch.Size], *, share: tuple[int, int] = (0, 1)) -> Base:
    """Return the model in `folder`, of Hugging Face's or a checkpoint. Of its files this process looks through the `share` that it has.

    Raises ForeignCheckpoint if it is another, with what differs; CheckpointError if it cannot be read.
    """
    if not (folder / manifest.NAME).exists():
        return Base(pretrained.load(folder, shape, sizes), pretrained.fingerprint(folder))
    found = Whole(folder, manifest.read(folder))
    there, place = found.config.transformer_architecture, f"config trainer.init_from {folder}"
    if different := pretrained.differences(there, shape):
        raise ForeignCheckpoint(
            f"is another model: {'; '.join(different)}", place=place, hint="make transformer_architecture what it is there"
        )
    if there.beside:
        reason = f"has {there.beside[0]} of its own"
        raise ForeignCheckpoint(
            reason, place=place, hint="begin with the model that it stands beside, or with what swarmtrain export merges"
        )
    if there.embedding_head_config:
        raise ForeignCheckpoint("has embedding_head_config of its own", place=place, hint="trainer.load_dir goes on from it")
    number, count = share
    manifest.verify(folder, found.content, sorted(found.content.files)[number::count])
    return Base(found.parameter, found.content.fingerprint)


def find(source: Path, beside: Path | None = None) -> Whole:
    """Return the checkpoint `source`, or the newest whole one in it. Raises CheckpointError if there is none.

    `beside`: where the model is that it stands beside, if it has what was trained alone.
    """
    if (source / manifest.NAME).exists():
        content = manifest.read(source)
        manifest.verify(source, content, sorted(content.files))
        return Whole(source, content, beside)
    damage = ""
    for path, content in stage.newest_first(source):
        try:
            manifest.verify(path, content, sorted(content.files))
        except CheckpointError as error:
            damage = damage or f": {error}"
        else:
            return Whole(path, content, beside)
    raise CheckpointError(f"has no checkpoint that is whole{damage}", place=str(source), hint="name the trainer.save_dir of a run")
