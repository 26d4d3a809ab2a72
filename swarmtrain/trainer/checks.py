"""Whether the numbers of a step are sound, and what torch's own checks say of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import agreement

_SHOWN = 3
_KNOWN = {
    "does not have a deterministic implementation": "set trainer.deterministic: prefer to have it nevertheless",
    "returned nan values": "above stands where the operation was called; trainer.detect_anomaly is what looks for it",
}
"""What is in the messages of torch's checks, and what to do then."""


def non_finite(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many values of this rank's part of each tensor are infinite or no number, leaving out those that have none."""
    counts = {name: int((~_local(tensor).isfinite()).sum()) for name, tensor in tensors.items()}
    return {name: count for name, count in counts.items() if count}


def told(counts: Mapping[str, int]) -> str:
    """Return where gradients are not finite, as every rank's `counts` have it. Called by all ranks together."""
    by_rank = agreement.gather(dict(counts))
    rank = next((rank for rank, found in enumerate(by_rank) if found), None)
    if rank is None:
        return "all gradients are finite"
    names = list(by_rank[rank])
    rest = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
    count = sum(by_rank[rank].values())
    values = f"{count:,} values of rank {rank}'s gradients are" if count > 1 else f"1 value of rank {rank}'s gradients is"
    return f"{values} not finite, in {shown}"


@contextmanager
def explained(number: int) -> Iterator[None]:
    """Make step `number` in the body. What anomaly and deterministic mode find there is raised as TrainingError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        for sign, hint in _KNOWN.items():
            if sign in text:
                raise TrainingError(text.partition(". ")[0].strip("."), place=f"step {number}", hint=hint) from None
        raise


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
