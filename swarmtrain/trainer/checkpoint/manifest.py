"""A checkpoint's manifest: everything but the tensors, as JSON, with the size and SHA-256 of every file and of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from swarmtrain.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1
BASE = "base"
"""Of a manifest's state: see Manifest.base."""
_BLOCK = 1 << 22
_LATER = {"held_out_loss", "state"}
"""What older checkpoints of this format lack."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds and where it stands."""

    token: int
    """World token of the world that wrote it; checkpoints are ordered by (token, step)."""
    step: int
    """Optimizer steps made."""
    consumed_samples: int
    """Position in the order of samples."""
    loss_before: float | None
    """Held-out loss before the first step."""
    data: str
    """Fingerprint of the training data."""
    random: dict[str, Any]
    """What random numbers are derived from. No generator's state is kept: each micro batch seeds anew."""
    topology: dict[str, int]
    files: dict[str, dict[str, Any]]
    """Name to size in bytes and SHA-256."""
    tensors: dict[str, Any]
    """Name to dtype, size and chunks, each with file and offset."""
    config: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    held_out_loss: float | None = None
    """Held-out loss after `step`, if it was measured."""
    state: dict[str, Any] = field(default_factory=dict)
    """What else a script of one's own keeps: see trees.py."""
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """What its tensors are, as a digest: those of the model that it stands beside included."""
        files = sorted((name, facts["sha256"]) for name, facts in self.files.items())
        return hashlib.sha256(json.dumps([files, self.base]).encode()).hexdigest()

    @property
    def base(self) -> str | None:
        """The fingerprint of the model, trainer.init_from, that has what was not trained; None if all is here."""
        found: str | None = self.state.get(BASE)
        return found

    def to_text(self) -> str:
        """Return the manifest as JSON, its own digest included."""
        values = asdict(self)
        return json.dumps({"digest": _digest(values), **values}, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str, place: str) -> Manifest:
        """Read what `to_text` wrote. Raises CheckpointError if a bit of it has changed, or its format is another."""
        try:
            values = json.loads(text)
            digest = values.pop("digest")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"its {NAME} is torn", place=place) from None
        if values.get("format") != FORMAT:
            raise CheckpointError(f"its format is {values.get('format')}, not {FORMAT}", place=place)
        wanted = {item.name for item in fields(cls)}
        if digest != _digest(values) or not wanted - _LATER <= set(values) <= wanted:
            raise CheckpointError(f"its {NAME} is damaged", place=place)
        return cls(**values)


def read(folder: Path) -> Manifest:
    """Return the manifest in `folder`. Raises CheckpointError if it is missing or damaged."""
    try:
        text = (folder / NAME).read_text()
    except OSError as error:
        raise CheckpointError(f"its {NAME} cannot be read: {error.strerror}", place=str(folder)) from None
    except UnicodeDecodeError:
        raise CheckpointError(f"its {NAME} is damaged", place=str(folder)) from None
    return Manifest.from_text(text, str(folder))


def verify(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the files `names` with the manifest. Raises CheckpointError for the first that is missing, too short or altered."""
    for name in names:
        wanted, path = manifest.files[name], folder / Path(name).name
        try:
            size = path.stat().st_size
            if size != wanted["size"]:
                raise CheckpointError(f"{name} has {size} bytes instead of {wanted['size']}", place=str(folder))
            if _file_digest(path) != wanted["sha256"]:
                raise CheckpointError(f"{name} is damaged: its SHA-256 is another", place=str(folder))
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}", place=str(folder)) from None


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
