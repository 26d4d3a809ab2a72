"""Split the result of `state_dict()` into tensors and JSON, and merge them again, without pickle.

In the JSON, a tensor becomes {"tensor": NAME}, or {"empty": [SHAPE, DTYPE]} if it has no elements; a tuple becomes {"tuple": […]}, and a
dict {"dict": [[KEY, VALUE], …]}. Numbers, strings and None are unchanged; a list stays a list. A subclass of dict, such as
OrderedDict, is restored as a plain dict, and a numpy array as a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.checkpoint.storage.tensor_storage import DTYPES_BY_NAME

_HINT = "return only tensors, numbers, strings, None, and lists, tuples and dicts of these from state_dict()"


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
