"""What a script of one's own keeps in its checkpoints: whatever has a state_dict(), the same on all ranks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from swarmtrain.config import Config
from swarmtrain.errors import CheckpointError, ForeignCheckpoint, TrainingError
from swarmtrain.trainer.checkpoint import first_reason
from swarmtrain.trainer.checkpoint.fit import differences
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.search import Found
from swarmtrain.trainer.checkpoint.storage import DTYPES, Reader
from swarmtrain.trainer.checkpoint.trees import put_together, take_apart


class Stateful(Protocol):
    """A model, an optimizer, a schedule, a sampler, an object of one's own."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Kept:
    """Objects by name. Implements swarmtrain.trainer.checkpoint.held.Held."""

    topology: Mapping[str, int] = {}

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        """Raises TrainingError if one has no state_dict()."""
        for name, one in objects.items():
            if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
                hint = "give the class both, or leave it out"
                raise TrainingError(
                    f"{name} has no state_dict() and load_state_dict(): it is a {type(one).__name__}", place="keep", hint=hint
                )
        self._objects = {name: _bare(one) for name, one in objects.items()}
        self._state: dict[str, Any] = {}
        self.going: dict[str, Any] = {}
        """How far the script's data is read; saved with the rest."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors. Raises TrainingError if there is something that cannot be kept."""
        found: dict[str, Tensor] = {}
        trees = {name: take_apart(one.state_dict(), name, found) for name, one in self._objects.items()}
        if divided := next((name for name, tensor in found.items() if isinstance(tensor, DTensor)), None):
            hint = "keep() is for what every rank has whole, as under DistributedDataParallel"
            raise TrainingError("is divided among ranks", place=f"keep: {divided}", hint=hint)
        self._state = {"objects": trees, "going": dict(self.going), "script": _script()}
        return found

    def state(self) -> dict[str, Any]:
        """Return what was no tensor when tensors() was called last."""
        return self._state

    def load(self, path: Path, content: Manifest) -> None:
        """Load the checkpoint at `path` into the objects. Called by all ranks together. Raises ForeignCheckpoint, CheckpointError."""
        trees = content.state.get("objects", {})
        if trees.keys() != self._objects.keys():
            there, here = (", ".join(sorted(names)) or "nothing of a script's own" for names in (trees, self._objects))
            hint = "call keep() with the same names, or choose another trainer.save_dir"
            raise ForeignCheckpoint(f"has {there}, and the script keeps {here}", place=str(path), hint=hint)
        tensors = {name: torch.empty(entry["size"], dtype=DTYPES[entry["dtype"]]) for name, entry in content.tensors.items()}
        try:
            dcp.load(tensors, storage_reader=Reader(path, content.tensors))
        except CheckpointException as error:  # a BaseException, so nobody else would catch it
            raise CheckpointError(first_reason(error), place=str(path)) from None
        for name, one in self._objects.items():
            try:
                one.load_state_dict(put_together(trees[name], tensors))
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                hint = "make it what it was, or choose another trainer.save_dir"
                raise ForeignCheckpoint(f"{name} does not take it: {error}", place=str(path), hint=hint) from None
        self.going = dict(content.state["going"])


def changed(found: Found, config: Config) -> Iterator[str]:
    """Yield what is another than when the checkpoint `found` was written: in the config, in the command line, in the script."""
    content = found[1]
    yield from differences(content.config, config.model_dump(mode="json"), "config")
    there, here = content.state.get("script", {}), _script()
    if there.get("arguments", here["arguments"]) != here["arguments"]:
        yield f"arguments are {' '.join(there['arguments'])} there and {' '.join(here['arguments'])} here"
    if there.get("sha256", here["sha256"]) != here["sha256"]:
        yield f"{here['name']} is not the same file"


def _script() -> dict[str, Any]:
    path = Path(getattr(sys.modules["__main__"], "__file__", "") or "")
    content = path.read_bytes() if path.is_file() else b""
    return {"name": path.name, "arguments": sys.argv[1:], "sha256": hashlib.sha256(content).hexdigest()}


def _bare(one: Any) -> Stateful:
    """Return what DistributedDataParallel or torch.compile is around: its names are the same in every world."""
    while isinstance(one, torch.nn.Module) and (within := getattr(one, "_orig_mod", None) or _replicated(one)) is not None:
        one = within
    return one  # type: ignore[no-any-return]  # as was checked


def _replicated(one: torch.nn.Module) -> torch.nn.Module | None:
    return one.module if isinstance(one, torch.nn.parallel.DistributedDataParallel) else None
