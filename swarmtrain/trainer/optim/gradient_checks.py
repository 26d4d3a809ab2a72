"""Checks for non-finite values in gradients, and explanations of errors raised by torch's anomaly and determinism checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import collectives

_MAX_NAMES_SHOWN = 3
_HINT_BY_MESSAGE = {
    "does not have a deterministic implementation": "set trainer.deterministic: prefer to allow nondeterministic operations",
    "returned nan values": "see the traceback above: it shows the forward operation whose gradient is NaN",
}
"""Fragments of the error messages of torch's anomaly and determinism checks, and a hint for each."""


def count_non_finite_values(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of NaN/Inf values in this rank's shard of each tensor, by name. Tensors without such values are omitted."""
    counts = {name: int((~_to_local_tensor(tensor).isfinite()).sum()) for name, tensor in tensors.items()}
    return {name: count for name, count in counts.items() if count}


def describe_non_finite_gradients(counts: Mapping[str, int]) -> str:
    """Return a description of the gradients with NaN/Inf values on the first rank that has any. Collective: all ranks must call it.

    `counts`: result of `count_non_finite_values` on this rank.
    """
    counts_by_rank = collectives.all_gather_values(dict(counts))
    rank = next((rank for rank, rank_counts in enumerate(counts_by_rank) if rank_counts), None)
    if rank is None:
        return "all gradients are finite"
    names = list(counts_by_rank[rank])
    hidden_count = len(names) - _MAX_NAMES_SHOWN
    names_text = ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {hidden_count} more" if hidden_count > 0 else "")
    count = sum(counts_by_rank[rank].values())
    values = f"{count:,} NaN/Inf values in rank {rank}'s gradients" if count > 1 else f"1 NaN/Inf value in rank {rank}'s gradients"
    return f"{values}, in {names_text}"


@contextmanager
def explain_torch_errors(step: int) -> Iterator[None]:
    """Context manager for step `step`: errors of torch's anomaly and determinism checks are re-raised as TrainingError with a hint."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        for fragment, hint in _HINT_BY_MESSAGE.items():
            if fragment in text:
                raise TrainingError(text.partition(". ")[0].strip("."), place=f"step {step}", hint=hint) from None
        raise


def _to_local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
