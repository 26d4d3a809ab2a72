"""Whether a checkpoint fits what is to be trained: the same parameters, and state of the same optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NoReturn

from swarmtrain.errors import ForeignCheckpoint

Sizes = Mapping[str, tuple[int, ...]]


def names_to_load(found: Sizes, wanted: Sizes, place: str) -> list[str]:
    """Return which of the tensors `wanted` to read from a checkpoint that holds `found`, all named model/… or optimizer/KIND/….

    State that the checkpoint has not begins anew, where there is nothing to lose by it: where the checkpoint has none
    of that parameter's at all, or where it is no parameter's own.
    Raises ForeignCheckpoint if it is of another model, or has another optimizer's state.
    """
    if different := sorted(
        name for name in found.keys() | wanted.keys() if name.startswith("model/") and found.get(name) != wanted.get(name)
    ):
        name = different[0]
        there, here = found.get(name, "missing"), wanted.get(name, "missing")
        raise ForeignCheckpoint(
            f"is of another model: {name} is {there} there and {here} here; {len(different)} differ",
            place=place,
            hint="make transformer_architecture what it was, or choose another trainer.save_dir",
        )
    kept, needed = _kinds(found), _kinds(wanted)
    for name in sorted(needed):
        if f"model/{name}" in found and kept[name] and kept[name] != needed[name]:
            _refuse(name, kept[name], needed[name], place)
    return [name for name in wanted if name in found]


def _refuse(name: str, there: Iterable[str], here: Iterable[str], place: str) -> NoReturn:
    raise ForeignCheckpoint(
        f"has another optimizer's state: of {name} it has {' and '.join(sorted(there))}, and {' and '.join(sorted(here))} is wanted",
        place=place,
        hint="make optimizer.method (or the group's) what it was, or choose another trainer.save_dir",
    )


def _kinds(sizes: Sizes) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in sizes:
        group, _, rest = name.partition("/")
        if group == "optimizer":
            kind, _, parameter = rest.partition("/")
            kinds[parameter].add(kind)
    return kinds
