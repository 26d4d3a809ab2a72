"""Numbers of many ranks as one: what a rank logs, and what ranks come to together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.files import finite

Named = dict[str, "Reduced"]
"""What one rank logs of one step."""


class How(StrEnum):
    """Ways to make one value of those of all ranks that have one, in the order of ranks."""

    mean = "mean"
    sum = "sum"
    min = "min"
    max = "max"
    last = "last"
    cat = "cat"


@dataclass(frozen=True)
class Reduced:
    """A value of this rank, and what is to become of those of all ranks."""

    value: Any
    how: How = How.mean

    def fetched(self) -> Reduced:
        """Return the same with plain numbers. Waits for the device on which a tensor is."""
        if not isinstance(self.value, Tensor):
            return self
        return Reduced(self.value.flatten().tolist() if self.how is How.cat else self.value.item(), self.how)


def taken(name: str, value: Any) -> Iterator[tuple[str, Reduced]]:
    """Yield what `value` is under `name`; several, if it is a metric that has several. No device is waited for.

    A tensor is copied where it is, since the script goes on with it; a metric is asked for its value, on all ranks together.
    Raises TrainingError for what is no number.
    """
    how = value.how if isinstance(value, Reduced) else How.mean
    plain = value.value if isinstance(value, Reduced) else value
    if callable(compute := getattr(plain, "compute", None)):
        plain = compute()
    if isinstance(plain, Mapping):
        for key, part in plain.items():
            yield from taken(f"{name}.{key}", Reduced(part, how))
        return
    if isinstance(plain, Tensor):
        plain = plain.detach().clone()
        if how is not How.cat and plain.numel() != 1:
            raise _wrong(name, f"is {plain.numel()} numbers", "reduce it to one first, or run.cat(...) for all of them")
    elif how is How.cat:
        plain = [_number(name, each) for each in (plain if isinstance(plain, Sequence) else [plain])]
    else:
        plain = _number(name, plain)
    yield name, Reduced(plain, how)


def together(everybody: Sequence[Mapping[str, Reduced]]) -> dict[str, Any]:
    """Return the values of all ranks as one line. A value that is no finite number is None."""
    found: dict[str, list[Reduced]] = {}
    for of_rank in everybody:
        for name, reduced in of_rank.items():
            found.setdefault(name, []).append(reduced)
    return {name: _finite(_WAYS[parts[0].how]([part.value for part in parts])) for name, parts in found.items()}


_WAYS: dict[How, Callable[[list[Any]], Any]] = {
    How.mean: lambda values: sum(values) / len(values),
    How.sum: sum,
    How.min: min,
    How.max: max,
    How.last: lambda values: values[-1],
    How.cat: lambda values: [number for part in values for number in part],
}


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _wrong(name, f"is no number but {type(value).__name__}", "a number, a tensor of one, or a torchmetrics object") from None


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return finite(value) if isinstance(value, float) else value


def _wrong(name: str, message: str, hint: str) -> TrainingError:
    return TrainingError(f"{name} {message}", place="run.log", hint=hint)
