"""Manifest of a checkpoint: a JSON file with everything except the tensors' bytes, including size and digest of every tensor file.

The manifest also contains a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint
from swarmtrain.trainer.checkpoint.file_digests import FileDigests, get_digest, hash_file

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 3
"""Version of the manifest format that is written. Version 1 had other keys and was never released."""
_READ_FORMATS = (2, FORMAT_VERSION)
"""Version 2 has the SHA-256 of whole files: see file_digests."""
BASE_KEY = "base"
"""Key in the manifest's `state` for the fingerprint of the base model: see Manifest.base_fingerprint."""
REPRODUCIBILITY_KEY = "reproducibility"
"""Key in the manifest's `state` for which runs have equal losses; absent if the sums of gradients are exact."""
_OPTIONAL_FIELDS = {"run_id"}
"""Fields that checkpoints of earlier versions with the same format lack."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint, and the training progress when it was written."""

    generation: int
    """Generation of the world that wrote the checkpoint; checkpoints are ordered by (generation, step)."""
    step: int
    """Number of completed optimizer steps."""
    consumed_samples: int
    """Number of samples consumed up to this step, which is also the position in the sample order."""
    initial_validation_loss: float | None
    """Validation loss in nats before the first step."""
    data_fingerprint: str
    """Fingerprint of the training data."""
    rng: dict[str, Any]
    """Values from which seeds are derived. The state of random number generators is not saved: they are seeded for each micro batch."""
    topology: dict[str, int]
    files: FileDigests
    tensors: dict[str, Any]
    """Dtype, shape and chunks of each tensor, by name. For each chunk, its file and its byte offset in this file are stored."""
    config: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    validation_loss: float | None = None
    """Validation loss in nats after `step`; None if it was not evaluated."""
    run_id: str = ""
    """Id of the run (swarmtrain.protocol.run_identity); empty if it is unknown. A run that resumes this checkpoint keeps the id."""
    state: dict[str, Any] = field(default_factory=dict)
    """State without tensors: that of a custom script (see trainer/custom/user_state.py), or the fingerprint of the base model; and, if
    gradients are compressed, which runs have equal losses."""
    format: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """Digest of the checkpoint's tensors. For an adapter it also covers the base model's tensors."""
        files = sorted((name, get_digest(entry)) for name, entry in self.files.items())
        return hashlib.sha256(json.dumps([files, self.base_fingerprint]).encode()).hexdigest()

    @property
    def base_fingerprint(self) -> str | None:
        """Fingerprint of the base model (trainer.init_from), which has the frozen parameters; None if the checkpoint has all parameters."""
        value: str | None = self.state.get(BASE_KEY)
        return value

    def to_text(self) -> str:
        """Return the manifest as JSON text, including a digest of itself."""
        values = asdict(self)
        return json.dumps({"digest": _compute_json_digest(values), **values}, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str, place: str) -> Manifest:
        """Parse the JSON text of a manifest. `place` names the checkpoint in errors.

        Raises CheckpointError if the text is corrupt, IncompatibleCheckpoint if it has another format version.
        """
        try:
            values = json.loads(text)
            digest = values.pop("digest")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"its {MANIFEST_NAME} is corrupt", place=place) from None
        if values.get("format") not in _READ_FORMATS:
            raise IncompatibleCheckpoint(
                f"has format {values.get('format')}, but this version of swarmtrain reads formats {' and '.join(map(str, _READ_FORMATS))}",
                place=place,
                hint="resume with the version of swarmtrain that wrote it, or set trainer.save_dir to another folder",
            )
        missing = {item.name for item in fields(cls)} - set(values)
        unknown = set(values) - {item.name for item in fields(cls)}
        if digest != _compute_json_digest(values) or unknown or missing - _OPTIONAL_FIELDS:
            raise CheckpointError(f"its {MANIFEST_NAME} is corrupt: its digest does not match, or its keys are invalid", place=place)
        return cls(**values)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises CheckpointError if it is missing or corrupt, IncompatibleCheckpoint if it has another format version.
    """
    try:
        text = read_regular_file(folder / MANIFEST_NAME).decode()
    except OSError as error:
        raise CheckpointError(f"its {MANIFEST_NAME} cannot be read: {error.strerror}", place=str(folder)) from None
    except UnicodeDecodeError:
        raise CheckpointError(f"its {MANIFEST_NAME} is corrupt: it is not UTF-8", place=str(folder)) from None
    return Manifest.from_text(text, str(folder))


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare size and digest of the files `names` in `folder` with the manifest.

    Raises CheckpointError for the first file that is missing, or whose size or digest differs.
    """
    for name in names:
        expected, path = manifest.files[name], folder / Path(name).name
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{name} has {size} bytes instead of {expected['size']}", place=str(folder))
            if not hash_file(path, expected).matches():
                raise CheckpointError(f"{name} is corrupt: its SHA-256 does not match", place=str(folder))
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}", place=str(folder)) from None


def has_right_file_sizes(folder: Path, manifest: Manifest) -> bool:
    """Return whether `folder` has all files of the manifest, each with its size."""
    try:
        return all((folder / Path(name).name).stat().st_size == expected["size"] for name, expected in manifest.files.items())
    except OSError:
        return False


def _compute_json_digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
