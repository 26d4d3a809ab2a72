"""A checkpoint's manifest: everything but the tensors, as JSON, with the size and SHA-256 of every file and of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
"""Version 1 had other keys; no release wrote it."""
BASE_KEY = "base"
"""Key in a manifest's `state`: see Manifest.base_fingerprint."""
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds, and the training progress at it."""

    generation: int
    """Generation of the world that wrote it; checkpoints are ordered by (generation, step)."""
    step: int
    """Completed optimizer steps."""
    consumed_samples: int
    """Position in the order of samples."""
    initial_validation_loss: float | None
    """Validation loss before the first step."""
    data_fingerprint: str
    """Fingerprint of the training data."""
    rng: dict[str, Any]
    """What random numbers are derived from. Generator state is not saved: each micro batch sets the seed."""
    topology: dict[str, int]
    files: dict[str, dict[str, Any]]
    """Name to size in bytes and SHA-256."""
    tensors: dict[str, Any]
    """Name to dtype, size and chunks, each with file and offset."""
    config: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    validation_loss: float | None = None
    """Validation loss after `step`, if it was evaluated."""
    state: dict[str, Any] = field(default_factory=dict)
    """What else a custom script saves: see state_tree.py."""
    format: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """Digest of its tensors, including those of the base model that it adapts."""
        files = sorted((name, facts["sha256"]) for name, facts in self.files.items())
        return hashlib.sha256(json.dumps([files, self.base_fingerprint]).encode()).hexdigest()

    @property
    def base_fingerprint(self) -> str | None:
        """The fingerprint of the model trainer.init_from, which holds what was not trained; None if everything is in this checkpoint."""
        value: str | None = self.state.get(BASE_KEY)
        return value

    def to_text(self) -> str:
        """Return the manifest as JSON, with its own digest."""
        values = asdict(self)
        return json.dumps({"digest": _compute_digest(values), **values}, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str, place: str) -> Manifest:
        """Parse what to_text() returned. Raises CheckpointError if it is corrupt, IncompatibleCheckpoint if it has another format."""
        try:
            values = json.loads(text)
            digest = values.pop("digest")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"its {MANIFEST_NAME} is corrupt", place=place) from None
        if values.get("format") != FORMAT_VERSION:
            raise IncompatibleCheckpoint(
                f"has format {values.get('format')}, and this version of swarmtrain reads format {FORMAT_VERSION}",
                place=place,
                hint="continue with the version that wrote it, or set trainer.save_dir to another folder",
            )
        field_names = {item.name for item in fields(cls)}
        if digest != _compute_digest(values) or set(values) != field_names:
            raise CheckpointError(f"its {MANIFEST_NAME} is damaged", place=place)
        return cls(**values)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest in `folder`.

    Raises CheckpointError if it is missing or corrupt, IncompatibleCheckpoint if it has another format.
    """
    try:
        text = (folder / MANIFEST_NAME).read_text()
    except OSError as error:
        raise CheckpointError(f"its {MANIFEST_NAME} cannot be read: {error.strerror}", place=str(folder)) from None
    except UnicodeDecodeError:
        raise CheckpointError(f"its {MANIFEST_NAME} is damaged", place=str(folder)) from None
    return Manifest.from_text(text, str(folder))


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the files `names` with the manifest. Raises CheckpointError for the first that is missing, of another size or modified."""
    for name in names:
        expected, path = manifest.files[name], folder / Path(name).name
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{name} has {size} bytes instead of {expected['size']}", place=str(folder))
            if _compute_file_digest(path) != expected["sha256"]:
                raise CheckpointError(f"{name} is damaged: its SHA-256 is another", place=str(folder))
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}", place=str(folder)) from None


def _compute_digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _compute_file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
