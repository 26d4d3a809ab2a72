"""Check that all token files, and the model that is trained on them, have the same tokenizer.

Tokens of another tokenizer are valid numbers, so that nothing else would notice: the model would only learn badly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import DataError, TrainingError
from swarmtrain.trainer.checkpoint import manifest
from swarmtrain.trainer.checkpoint.storage import commit
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.tokenize import tokenizer_backends


@dataclass(frozen=True)
class RecordedTokenizer:
    """A tokenizer, and what it belongs to, such as a token file."""

    owner: str
    name: str
    sha256: str
    recorded_identity: str = ""
    """As BaseTokenizer.identity; empty if it is not recorded."""
    is_of_model: bool = False
    """Whether it was found in the folder of a model, and not recorded with token files."""

    def is_same(self, other: RecordedTokenizer) -> bool:
        """Return whether both assign the same tokens to texts.

        Where that cannot be computed on this machine: whether two recorded files are equal; True for the file of a model.
        """
        if self.sha256 == other.sha256 and not (self.recorded_identity and other.recorded_identity):
            return True
        identities = [each.recorded_identity or _compute_identity(each.name, each.sha256) for each in (self, other)]
        if all(identities):
            return identities[0] == identities[1]
        return self.sha256 == other.sha256 or self.is_of_model or other.is_of_model


def check_tokenizers(config: Config, files: Sequence[MemoryMap], evaluated_model: Path | None = None) -> None:
    """Check that `files`, and the model that `config` trains on them, have the same tokenizer, as far as it is known.

    `evaluated_model`: folder of a model that is evaluated, instead of the one that training starts from. Raises DataError, which names both
    tokenizers.
    """
    if config.data.allow_different_tokenizers:
        return
    tokenizers = [tokenizer for file in files if (tokenizer := _read_recorded_tokenizer(str(file.prefix), file.meta))]
    for folder in (evaluated_model,) if evaluated_model else (config.trainer.init_from, *config.trainer.load_dir[:1]):
        tokenizers += _read_model_tokenizers(folder) if folder else []
    for other in tokenizers[1:]:
        if not tokenizers[0].is_same(other):
            first = tokenizers[0]
            raise DataError(
                f"{first.owner} has the tokenizer {first.name}, but {other.owner} has {other.name}, which assigns other tokens",
                place="config data",
                hint="tokenize all data with the model's tokenizer; or set data.allow_different_tokenizers: true",
            )


def _read_recorded_tokenizer(owner: str, meta: Mapping[str, Any]) -> RecordedTokenizer | None:
    """Return the tokenizer that `data tokenize` has recorded in the metadata of a token file; None if there is no such record."""
    record = meta.get("prepared", {}).get("tokenizer")
    if not record:
        return None
    name, sha256 = str(record["name"]), str(record["sha256"])
    return RecordedTokenizer(owner, name, sha256, str(meta.get("tokenizer_identity", "")))


def _read_model_tokenizers(folder: Path) -> list[RecordedTokenizer]:
    """Return the tokenizer of a model; of a checkpoint, those of its training data that still exist. Empty if they are unknown."""
    tokenizer_path = folder / "tokenizer.json"
    try:
        if tokenizer_path.exists():
            name, sha256 = str(tokenizer_path), hashlib.sha256(read_regular_file(tokenizer_path)).hexdigest()
            return [RecordedTokenizer(f"the model in {folder}", name, sha256, is_of_model=True)]
        prefixes = [Path(prefix) for prefix in _read_checkpoint_config(folder).get("data", {}).get("data_prefixes", ())]
        metas = [json.loads(read_regular_file(formats.build_token_file_path(prefix, "meta.json"))) for prefix in prefixes]
    except (OSError, ValueError, TrainingError):
        return []
    return [tokenizer for meta in metas if (tokenizer := _read_recorded_tokenizer(f"the training data of {folder}", meta))]


def _read_checkpoint_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of a checkpoint, or of the newest in a save_dir; empty if there is none."""
    if (folder / manifest.MANIFEST_NAME).exists():
        return manifest.read_manifest(folder).config
    return next((content.config for _, content in commit.list_checkpoints_newest_first(folder)), {})


@cache
def _compute_identity(name: str, sha256: str) -> str:
    """Return the identity of the tokenizer `name`; empty if its file has changed, or cannot be read on this machine."""
    try:
        tokenizer = tokenizer_backends.open_tokenizer(name)
    except TrainingError:
        return ""
    return tokenizer.identity if tokenizer.sha256 == sha256 else ""
