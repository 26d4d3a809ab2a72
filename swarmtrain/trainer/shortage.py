"""Out of memory, told as what there was no room for, what has the room, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from swarmtrain.errors import TrainingError

_SIGNS = "out of memory", "can't allocate memory"
_NUMBER = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)
_HINT = "swarmtrain memory CONFIG tells what each rank needs, and tries what needs less: a smaller topology.micro_batch_size, "
_HINT += "topology.activation_checkpointing_type: every_layer, or topology.data_parallel_type: fsdp"


@contextmanager
def told(place: str, held: Callable[[], Mapping[str, Iterable[Tensor | None]]] = dict) -> Iterator[None]:
    """Raise what in the body found no memory as TrainingError. `held`: what is known to be there, by what it is for."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error) or "no memory is left"
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(sign in text for sign in _SIGNS):
            raise
        raise TrainingError(_reason(text) + _taken(held()), place=place, hint=_HINT) from None


def _reason(text: str) -> str:
    """Return torch's own words, as far as they tell something: the device, and how much more was wanted."""
    if found := _NUMBER.search(text):
        return f"can't allocate memory: {_told(int(found[1]))} more were wanted"
    return ". ".join(text.splitlines()[0].split(". ")[:2]).strip(". ")


def _taken(held: Mapping[str, Iterable[Tensor | None]]) -> str:
    sizes = {
        what: sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None) for what, tensors in held.items()
    }
    there = ", ".join(f"{_told(size)} of {what}" for what, size in sizes.items() if size)
    return f"; there were {there}, and the rest is activations and what a step needs in between" if there else ""


def _told(size: int) -> str:
    unit, word = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.1f} {word}"
