"""State that a custom script saves in its checkpoints: objects with a state_dict() that is the same on all ranks.

The result of `state_dict()` is split into tensors and JSON, without pickle. In the JSON, a tensor becomes {"tensor": NAME}, or {"empty":
[SHAPE, DTYPE]} if it has no elements; a tuple becomes {"tuple": […]}, and a dict {"dict": [[KEY, VALUE], …]}. Numbers, strings and None
are unchanged; a list stays a list. A subclass of dict, such as OrderedDict, is restored as a plain dict, and a numpy array as a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from swarmtrain.errors import IncompatibleCheckpoint, TrainingError
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage.tensor_reader import FileVerification, load_tensors
from swarmtrain.trainer.checkpoint.storage.tensor_storage import DTYPES_BY_NAME

_HINT = "return only tensors, numbers, strings, None, and lists, tuples and dicts of these from state_dict()"


class Stateful(Protocol):
    """Interface of objects that can be saved: a model, optimizer, schedule, sampler, or other object with these two methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class UserState:
    """Collects and loads the state of the objects that a script has registered.

    Implements swarmtrain.trainer.checkpoint.training_state.CheckpointState.
    """

    topology: Mapping[str, int] = {}

    def __init__(self, stateful_objects: Mapping[str, Stateful]) -> None:
        """Register `stateful_objects`, by name. Raises TrainingError if an object has no state_dict() or load_state_dict()."""
        for name, stateful in stateful_objects.items():
            if not (callable(getattr(stateful, "state_dict", None)) and callable(getattr(stateful, "load_state_dict", None))):
                hint = "implement both methods, or do not register the object"
                raise TrainingError(
                    f"{name} does not implement state_dict() and load_state_dict(): its type is {type(stateful).__name__}",
                    place="register_for_checkpointing",
                    hint=hint,
                )
        self._objects = {name: _unwrap_module(stateful) for name, stateful in stateful_objects.items()}
        self._state: dict[str, Any] = {}
        self.data_layout: dict[str, Any] = {}
        """Batch size and other settings of the script's data, saved in checkpoints so that a restart can detect changes."""

    def collect_tensors(self) -> dict[str, Tensor]:
        """Return all tensors in the objects' state, by name. Raises TrainingError if an object cannot be saved."""
        tensors: dict[str, Tensor] = {}
        trees = {name: flatten_state(stateful.state_dict(), name, tensors) for name, stateful in self._objects.items()}
        if sharded_name := next((name for name, tensor in tensors.items() if isinstance(tensor, DTensor)), None):
            hint = "register only state that is complete on every rank, as under DistributedDataParallel"
            raise TrainingError("is sharded across ranks", place=f"register_for_checkpointing: {sharded_name}", hint=hint)
        self._state = {"objects": trees, "data_layout": dict(self.data_layout)}
        return tensors

    def list_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the registered optimizers of torch."""
        return [stateful for stateful in self._objects.values() if isinstance(stateful, torch.optim.Optimizer)]

    def list_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the registered modules, by name."""
        modules = {name: module for name, module in self._objects.items() if isinstance(module, torch.nn.Module)}
        return {f"{name}/{key}": parameter for name, module in modules.items() for key, parameter in module.named_parameters()}

    def collect_rank_tensors(self) -> dict[str, Tensor]:
        """Return an empty dict: the objects' state is that of rank 0."""
        return {}

    def collect_non_tensor_state(self) -> dict[str, Any]:
        """Return all state that is not a tensor, as it was at the last call of collect_tensors()."""
        return self._state

    def load_checkpoint(self, path: Path, manifest: Manifest, verification: FileVerification | None = None) -> None:
        """Load the checkpoint at `path`, described by `manifest`, into the objects. Collective: all ranks must call it.

        `verification`: also verify these files. Raises IncompatibleCheckpoint if the checkpoint has other objects, or if an object rejects
        its saved state; DamagedFiles if the checkpoint cannot be read or is corrupt: the objects are unchanged then.
        """
        trees = manifest.state.get("objects", {})
        if trees.keys() != self._objects.keys():
            saved_names, current_names = (", ".join(sorted(names)) or "no registered objects" for names in (trees, self._objects))
            hint = "call register_for_checkpointing() with the same names, or choose another trainer.save_dir"
            raise IncompatibleCheckpoint(f"has {saved_names}, but the script registers {current_names}", place=str(path), hint=hint)
        tensors = {name: torch.empty(entry["size"], dtype=DTYPES_BY_NAME[entry["dtype"]]) for name, entry in manifest.tensors.items()}
        load_tensors(tensors, path, manifest, verification)
        for name, stateful in self._objects.items():
            try:
                stateful.load_state_dict(unflatten_state(trees[name], tensors))
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                hint = "restore the previous object, or choose another trainer.save_dir"
                raise IncompatibleCheckpoint(f"{name} does not accept the saved state: {error}", place=str(path), hint=hint) from None
        self.data_layout = dict(manifest.state["data_layout"])


def _unwrap_module(stateful: Any) -> Stateful:
    """Return the module that DistributedDataParallel or torch.compile wraps, so that parameter names do not depend on the wrapper.

    Any other object is returned unchanged.
    """
    while isinstance(stateful, torch.nn.Module) and (inner := getattr(stateful, "_orig_mod", None) or _unwrap_ddp(stateful)) is not None:
        stateful = inner
    return stateful  # type: ignore[no-any-return]  # checked in __init__


def _unwrap_ddp(module: torch.nn.Module) -> torch.nn.Module | None:
    return module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else None


def flatten_state(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `state` as JSON, and add its tensors to `tensors`, under names that begin with `name`.

    Raises TrainingError if `state` contains an object of an unsupported type.
    """
    match state:
        case None | bool() | int() | float() | str():
            return state
        case Tensor():
            return _register_tensor(state.detach(), name, tensors)
        case np.ndarray() | np.generic():
            return _register_tensor(torch.from_numpy(np.array(state)), name, tensors)
        case Mapping():
            return {"dict": [[flatten_state(key, name, {}), flatten_state(item, f"{name}/{key}", tensors)] for key, item in state.items()]}
        case tuple():
            return {"tuple": [flatten_state(item, f"{name}/{number}", tensors) for number, item in enumerate(state)]}
        case list():
            return [flatten_state(item, f"{name}/{number}", tensors) for number, item in enumerate(state)]
    raise TrainingError(f"has a value of a type that cannot be saved: {type(state).__name__}", place=name, hint=_HINT)


def unflatten_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild and return the value that `flatten_state` split into `tree` and `tensors`."""
    match tree:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"empty": [list(size), str(dtype)]}:
            return torch.empty(size, dtype=DTYPES_BY_NAME[dtype])
        case {"dict": list(items)}:
            return {unflatten_state(key, tensors): unflatten_state(item, tensors) for key, item in items}
        case {"tuple": list(items)}:
            return tuple(unflatten_state(item, tensors) for item in items)
        case list(items):
            return [unflatten_state(item, tensors) for item in items]
    return tree


def _register_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> Any:
    if not tensor.numel():
        return {"empty": [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}
    if name in tensors:
        raise TrainingError("is not a unique tensor name: two keys of a dict have the same string representation", place=name, hint=_HINT)
    tensors[name] = tensor
    return {"tensor": name}
