"""Load the full (unsharded) parameters of a model one at a time, from a checkpoint of any topology or from trainer.init_from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig
from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint
from swarmtrain.trainer.checkpoint import manifest
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage import commit
from swarmtrain.trainer.checkpoint.storage.tensor_reader import load_tensors
from swarmtrain.trainer.checkpoint.storage.tensor_storage import DTYPES_BY_NAME
from swarmtrain.trainer.huggingface import pretrained
from swarmtrain.trainer.model.peft import is_peft_parameter
from swarmtrain.trainer.model.transformer import Transformer

_MODEL_PREFIX = "model/"


@dataclass(frozen=True)
class BaseWeights:
    """The parameters of the model that a run is initialized from."""

    load_parameter: Callable[[str, torch.Size], Tensor]
    """Function that returns a full parameter, given its name and shape."""
    fingerprint: str
    """Digest of the model's files."""


@dataclass(frozen=True)
class ConsolidatedCheckpoint:
    """A complete checkpoint, from which full parameters can be loaded."""

    path: Path
    manifest: Manifest
    base_folder: Path | None = None
    """Folder of the base model, if the checkpoint is an adapter and the base model's folder was moved.

    None: the folder that the checkpoint's config names.
    """

    @cached_property
    def config(self) -> Config:
        """Config of the run that wrote the checkpoint. Raises CheckpointError if this version of swarmtrain cannot parse it."""
        try:
            return Config.from_json(json.dumps(self.manifest.config))
        except ValueError as error:
            reason = f"this version of swarmtrain cannot read the config in its manifest: {error}"
            raise CheckpointError(reason, place=str(self.path), hint="use the version of swarmtrain that wrote the checkpoint") from None

    def find_parameter_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the parameter `name`. Raises CheckpointError if the checkpoint has no parameter with this name."""
        if _MODEL_PREFIX + name not in self.manifest.tensors:
            if self.manifest.base_fingerprint:
                return torch.float64 if self.config.transformer_architecture.precision is Precision.float64 else torch.float32
            raise CheckpointError(f"has no parameter {name}", place=str(self.path), hint="use a checkpoint of this model")
        return DTYPES_BY_NAME[self.manifest.tensors[_MODEL_PREFIX + name]["dtype"]]

    def load_parameter(self, name: str, size: torch.Size | tuple[int, ...]) -> Tensor:
        """Return the full parameter `name`, with shape `size`, on the CPU. Raises CheckpointError if it cannot be read."""
        if self.manifest.base_fingerprint and _MODEL_PREFIX + name not in self.manifest.tensors:
            return self._base_weights.load_parameter(name, torch.Size(size)).to(self.find_parameter_dtype(name))
        values = {_MODEL_PREFIX + name: torch.empty(size, dtype=self.find_parameter_dtype(name))}
        load_tensors(values, self.path, self.manifest, is_collective=False)
        return values[_MODEL_PREFIX + name]

    @cached_property
    def _base_weights(self) -> BaseWeights:
        """Parameters of the base model, from which the parameters that the checkpoint lacks are loaded.

        Raises CheckpointError if the base model is missing or was changed.
        """
        architecture, folder = self.config.transformer_architecture, self.base_folder or self.config.trainer.init_from
        sizes = {
            name: parameter.shape for name, parameter in Transformer(architecture, 0).named_parameters() if not is_peft_parameter(name)
        }
        if folder is None or not folder.exists():
            reason = f"is an adapter of the model {folder}, which is not on this machine"
            raise CheckpointError(reason, place=str(self.path), hint="pass the path of the base model with --base")
        base_weights = open_base_weights(folder, architecture, sizes)
        if base_weights.fingerprint != self.manifest.base_fingerprint:
            reason = f"is an adapter whose base model is not {folder}, or that model has changed"
            raise CheckpointError(reason, place=str(self.path), hint="pass the path of the base model with --base")
        return base_weights


def open_base_weights(
    folder: Path,
    architecture: TransformerArchitectureConfig,
    parameter_shapes: Mapping[str, torch.Size],
    *,
    file_shard: tuple[int, int] = (0, 1),
) -> BaseWeights:
    """Return the parameters of the model in `folder`, a Hugging Face model or a checkpoint.

    `parameter_shapes`: shapes of the expected parameters, by name. `file_shard`: (index, number of shards); if `folder` is a checkpoint,
    this process verifies only the files of this shard. Raises IncompatibleCheckpoint, with a list of differences, if the model in `folder`
    has another architecture, or if it already has PEFT parameters or an embedding head; CheckpointError if the model cannot be read.
    """
    if not (folder / manifest.MANIFEST_NAME).exists():
        return BaseWeights(
            pretrained.build_parameter_loader(folder, architecture, parameter_shapes), pretrained.compute_model_fingerprint(folder)
        )
    checkpoint = ConsolidatedCheckpoint(folder, manifest.read_manifest(folder))
    saved_shape, place = checkpoint.config.transformer_architecture, f"config trainer.init_from {folder}"
    if differing_fields := pretrained.find_architecture_differences(saved_shape, architecture):
        raise IncompatibleCheckpoint(
            f"is a different model: {'; '.join(differing_fields)}",
            place=place,
            hint="set transformer_architecture to that of the checkpoint",
        )
    if saved_shape.peft_fields:
        reason = f"cannot be used as a base model: it already has {saved_shape.peft_fields[0]}"
        raise IncompatibleCheckpoint(
            reason, place=place, hint="initialize from its base model, or from the merged model that swarmtrain export writes"
        )
    if saved_shape.embedding_head_config:
        raise IncompatibleCheckpoint(
            "cannot be used as a base model: it already has an embedding_head_config",
            place=place,
            hint="use trainer.load_dir to resume from it",
        )
    shard_index, shard_count = file_shard
    manifest.verify_files(folder, checkpoint.manifest, sorted(checkpoint.manifest.files)[shard_index::shard_count])
    return BaseWeights(checkpoint.load_parameter, checkpoint.manifest.fingerprint)


def find_checkpoint(checkpoint_or_save_dir: Path, base_folder: Path | None = None) -> ConsolidatedCheckpoint:
    """Return the checkpoint in the folder `checkpoint_or_save_dir`; if that is a save_dir, its newest complete checkpoint.

    `base_folder`: folder of the base model, if the checkpoint has only the trained parameters and the base model's folder was
    moved. Raises CheckpointError if there is no complete checkpoint.
    """
    if (checkpoint_or_save_dir / manifest.MANIFEST_NAME).exists():
        content = manifest.read_manifest(checkpoint_or_save_dir)
        manifest.verify_files(checkpoint_or_save_dir, content, sorted(content.files))
        return ConsolidatedCheckpoint(checkpoint_or_save_dir, content, base_folder)
    damage = ""
    for path, content in commit.list_checkpoints_newest_first(checkpoint_or_save_dir):
        try:
            manifest.verify_files(path, content, sorted(content.files))
        except CheckpointError as error:
            damage = damage or f": {error}"
        else:
            return ConsolidatedCheckpoint(path, content, base_folder)
    raise CheckpointError(
        f"has no complete checkpoint{damage}", place=str(checkpoint_or_save_dir), hint="pass the trainer.save_dir of a run"
    )
