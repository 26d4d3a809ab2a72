"""Explain out-of-memory errors: the failed allocation, the sizes of known tensors, and config changes that save memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from swarmtrain.errors import TrainingError

_OUT_OF_MEMORY_MESSAGES = "out of memory", "can't allocate memory"
_REQUESTED_BYTES = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)
_HINT = (
    "run swarmtrain memory CONFIG to estimate the memory of each rank, and to try settings that need less: a "
    "smaller topology.micro_batch_size, "
)
_HINT += "topology.activation_checkpointing_type: every_layer, or topology.data_parallel_type: fsdp"


@contextmanager
def explain_out_of_memory_error(
    place: str, get_allocated_tensors: Callable[[], Mapping[str, Iterable[Tensor | None]]] = dict
) -> Iterator[None]:
    """Context manager that re-raises an out-of-memory error of the body as TrainingError with an explanation.

    `place`: start of the error message, such as "step 5 on rank 3". `get_allocated_tensors` returns known tensors by purpose; the error
    reports their total sizes.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error) or "out of memory"
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(
            fragment in text for fragment in _OUT_OF_MEMORY_MESSAGES
        ):
            raise
        raise TrainingError(
            _summarize_error_message(text) + _format_allocated_memory(get_allocated_tensors()), place=place, hint=_HINT
        ) from None


def _summarize_error_message(text: str) -> str:
    """Return the useful part of torch's error message: the device, and the size of the failed allocation."""
    if match := _REQUESTED_BYTES.search(text):
        return f"can't allocate memory: {_format_bytes(int(match[1]))} more were requested"
    return ". ".join(text.splitlines()[0].split(". ")[:2]).strip(". ")


def _format_allocated_memory(tensors_by_purpose: Mapping[str, Iterable[Tensor | None]]) -> str:
    sizes = {
        purpose: sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
        for purpose, tensors in tensors_by_purpose.items()
    }
    allocated = ", ".join(f"{_format_bytes(size)} of {purpose}" for purpose, size in sizes.items() if size)
    return f"; allocated: {allocated}; the rest is activations and temporary buffers" if allocated else ""


def _format_bytes(byte_count: int) -> str:
    unit, unit_name = (2**30, "GiB") if byte_count >= 2**30 else (2**20, "MiB")
    return f"{byte_count / unit:,.1f} {unit_name}"
