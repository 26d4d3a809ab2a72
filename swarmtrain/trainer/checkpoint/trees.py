"""What a `state_dict()` returns, taken apart into tensors and JSON, and put together again; nothing is pickled.

A tensor becomes {"tensor": NAME}, a tuple {"tuple": […]}, a dict {"dict": [[KEY, VALUE], …]}; numbers, text, None and lists are
themselves. A dict of a kind of its own, as OrderedDict, comes back as a plain one, and an array of numpy as a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.checkpoint.storage import DTYPES

_HINT = "a state_dict() may have tensors, numbers, text, None, and lists, tuples and dicts of these"


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON, and add its tensors to `tensors`, by names that begin with `name`. Raises TrainingError."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return _tensor(value.detach(), name, tensors)
        case np.ndarray() | np.generic():
            return _tensor(torch.from_numpy(np.array(value)), name, tensors)
        case Mapping():
            return {"dict": [[take_apart(key, name, {}), take_apart(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
        case tuple():
            return {"tuple": [take_apart(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]}
        case list():
            return [take_apart(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]
    raise TrainingError(f"holds something that cannot be kept: {type(value).__name__}", place=name, hint=_HINT)


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `take_apart` took apart."""
    match tree:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"empty": [list(size), str(dtype)]}:
            return torch.empty(size, dtype=DTYPES[dtype])
        case {"dict": list(items)}:
            return {put_together(key, tensors): put_together(item, tensors) for key, item in items}
        case {"tuple": list(items)}:
            return tuple(put_together(item, tensors) for item in items)
        case list(items):
            return [put_together(item, tensors) for item in items]
    return tree


def _tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> Any:
    if not tensor.numel():
        return {"empty": [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}
    if name in tensors:
        raise TrainingError("stands twice", place=name, hint=_HINT)
    tensors[name] = tensor
    return {"tensor": name}
