"""The full parameters of a model, one at a time: from a checkpoint, whatever topology saved it, or from trainer.init_from."""

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
from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint
from swarmtrain.trainer.checkpoint import commit, describe_first_failure, manifest
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.tensor_storage import DTYPES_BY_NAME, TensorStorageReader
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.model.peft import is_added_parameter
from swarmtrain.trainer.model.transformer import Transformer

_MODEL_PREFIX = "model/"


@dataclass(frozen=True)
class BaseWeights:
    """The model that a run is initialized from."""

    load_parameter: Callable[[str, torch.Size], Tensor]
    """Returns a full parameter, by its name and size."""
    fingerprint: str
    """Digest of the model's content."""


@dataclass(frozen=True)
class ConsolidatedCheckpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest
    base_folder: Path | None = None
    """Where the base model of its adapter is now, if not where its config says."""

    @cached_property
    def config(self) -> Config:
        """The config that it was trained with. Raises CheckpointError if it is not valid in this version."""
        try:
            return Config.model_validate_json(json.dumps(self.manifest.config))
        except ValueError as error:
            reason = f"this version cannot read its config: {error}"
            raise CheckpointError(reason, place=str(self.path), hint="use the version that wrote it") from None

    def find_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter. Raises CheckpointError if there is no parameter of this name."""
        if _MODEL_PREFIX + name not in self.manifest.tensors:
            if self.manifest.base_fingerprint:
                return torch.float64 if self.config.transformer_architecture.precision is Precision.float64 else torch.float32
            raise CheckpointError(f"has no parameter {name}", place=str(self.path), hint="it is of another model")
        return DTYPES_BY_NAME[self.manifest.tensors[_MODEL_PREFIX + name]["dtype"]]

    def load_parameter(self, name: str, size: torch.Size | tuple[int, ...]) -> Tensor:
        """Return parameter `name`, which has this size, on the CPU. Raises CheckpointError."""
        if self.manifest.base_fingerprint and _MODEL_PREFIX + name not in self.manifest.tensors:
            return self._base_weights.load_parameter(name, torch.Size(size)).to(self.find_dtype(name))
        values = {_MODEL_PREFIX + name: torch.empty(size, dtype=self.find_dtype(name))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that only this process reads, which is intended
            try:
                dcp.load(values, storage_reader=TensorStorageReader(self.path, self.manifest.tensors), no_dist=True)
            except CheckpointException as error:  # a BaseException, so no `except Exception` would catch it
                raise CheckpointError(describe_first_failure(error), place=str(self.path)) from None
        return values[_MODEL_PREFIX + name]

    @cached_property
    def _base_weights(self) -> BaseWeights:
        """The base model, with the parameters that are not in the checkpoint. Raises CheckpointError if it has changed or is missing."""
        architecture, folder = self.config.transformer_architecture, self.base_folder or self.config.trainer.init_from
        sizes = {
            name: parameter.shape for name, parameter in Transformer(architecture, 0).named_parameters() if not is_added_parameter(name)
        }
        if folder is None or not folder.exists():
            reason = f"is an adapter of the model {folder}, which is not here"
            raise CheckpointError(reason, place=str(self.path), hint="--base names where that is")
        base_weights = open_base_weights(folder, architecture, sizes)
        if base_weights.fingerprint != self.manifest.base_fingerprint:
            reason = f"is an adapter of a model that {folder} is not, or not any more"
            raise CheckpointError(reason, place=str(self.path), hint="--base names where that is")
        return base_weights


def open_base_weights(
    folder: Path, architecture: TransformerArchitectureConfig, sizes: Mapping[str, torch.Size], *, file_shard: tuple[int, int] = (0, 1)
) -> BaseWeights:
    """Return the model in `folder`: a Hugging Face model or a checkpoint.

    Of a checkpoint's files this process verifies only its `file_shard`: (index, number of shards).
    Raises IncompatibleCheckpoint if it is another model, with the differences; CheckpointError if it cannot be read.
    """
    if not (folder / manifest.MANIFEST_NAME).exists():
        return BaseWeights(pretrained.open_parameters(folder, architecture, sizes), pretrained.compute_fingerprint(folder))
    checkpoint = ConsolidatedCheckpoint(folder, manifest.read_manifest(folder))
    saved_shape, place = checkpoint.config.transformer_architecture, f"config trainer.init_from {folder}"
    if differing_fields := pretrained.find_differences(saved_shape, architecture):
        raise IncompatibleCheckpoint(
            f"is another model: {'; '.join(differing_fields)}", place=place, hint="make transformer_architecture what it is there"
        )
    if saved_shape.peft_fields:
        reason = f"has {saved_shape.peft_fields[0]} of its own"
        raise IncompatibleCheckpoint(reason, place=place, hint="initialize from its base model, or from what swarmtrain export merges")
    if saved_shape.embedding_head_config:
        raise IncompatibleCheckpoint("has embedding_head_config of its own", place=place, hint="trainer.load_dir resumes from it")
    shard_index, shard_count = file_shard
    manifest.verify_files(folder, checkpoint.manifest, sorted(checkpoint.manifest.files)[shard_index::shard_count])
    return BaseWeights(checkpoint.load_parameter, checkpoint.manifest.fingerprint)


def find_checkpoint(source: Path, base_folder: Path | None = None) -> ConsolidatedCheckpoint:
    """Return the checkpoint `source`, or the newest complete one in it. Raises CheckpointError if there is none.

    `base_folder`: where the base model is, if the checkpoint holds only what was trained.
    """
    if (source / manifest.MANIFEST_NAME).exists():
        content = manifest.read_manifest(source)
        manifest.verify_files(source, content, sorted(content.files))
        return ConsolidatedCheckpoint(source, content, base_folder)
    damage = ""
    for path, content in commit.list_checkpoints_newest_first(source):
        try:
            manifest.verify_files(path, content, sorted(content.files))
        except CheckpointError as error:
            damage = damage or f": {error}"
        else:
            return ConsolidatedCheckpoint(path, content, base_folder)
    raise CheckpointError(f"has no complete checkpoint{damage}", place=str(source), hint="name the trainer.save_dir of a run")
