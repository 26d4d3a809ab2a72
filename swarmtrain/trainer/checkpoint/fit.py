"""Whether a checkpoint fits what is to be trained: the same parameters, and state of the same optimizer."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from swarmtrain.config.trainer import TrainerConfig
from swarmtrain.errors import ForeignCheckpoint
from swarmtrain.trainer.model.beside import ADAPTER, LORA

Sizes = Mapping[str, tuple[int, ...]]
_MODEL, _OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True)
class Rules:
    """What of a checkpoint is taken, and what may differ: patterns are searched in names of parameters."""

    ignored: tuple[str, ...] = ()
    may_lack: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()
    optimizer: bool = True
    tells: bool = True
    """Whether what is taken is told: it is not all that there is."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Rules:
        """Return the rules for trainer.load_dir."""
        # What is beside a model is added to one that was trained without.
        missing = (*config.allowed_missing_keys_in_checkpoint, re.escape(LORA), re.escape(ADAPTER))
        unexpected = config.allowed_unexpected_keys_in_checkpoint
        return cls(config.ignore_keys_in_checkpoint, missing, unexpected, config.load_optimizer_states)

    def takes(self, name: str) -> bool:
        """Return whether the tensor `name` is to be read if there is one."""
        return not _matches(self.ignored, name) and (self.optimizer or name.startswith(_MODEL))

    def allows(self, name: str, *, there: bool, here: bool) -> bool:
        """Return whether the parameter `name` may be `there`, in the checkpoint, or `here` alone."""
        if _matches(self.ignored, name):
            return True
        return (there or _matches(self.may_lack, name)) and (here or _matches(self.may_have, name))


EVERYTHING = Rules(tells=False)


def names_to_load(found: Sizes, wanted: Sizes, place: str, rules: Rules = EVERYTHING, because: str = "") -> list[str]:
    """Return which of the tensors `wanted` to read from a checkpoint that holds `found`, all named model/… or optimizer/KIND/….

    State that the checkpoint has not begins anew, where there is nothing to lose by it: where the checkpoint has none
    of that parameter's at all, or where it is no parameter's own.
    Raises ForeignCheckpoint if it is of another model, `because` of what, or has another optimizer's state.
    """
    different = [name for name in sorted(found.keys() | wanted.keys()) if name.startswith(_MODEL) and found.get(name) != wanted.get(name)]
    if different := [name for name in different if not (_one_sided(found, wanted, name, rules))]:
        name = different[0]
        there, here = found.get(name, "missing"), wanted.get(name, "missing")
        raise ForeignCheckpoint(
            f"is of another model: {name} is {there} there and {here} here; {len(different)} differ{because}",
            place=place,
            hint="make transformer_architecture what it was, or choose another trainer.save_dir",
        )
    taken = {name: size for name, size in found.items() if rules.takes(name)}
    kept, needed = _kinds(taken), _kinds(wanted)
    for name in sorted(needed):
        if f"{_MODEL}{name}" in taken and kept[name] and kept[name] != needed[name]:
            _refuse(name, kept[name], needed[name], place)
    return [name for name in wanted if name in taken]


def owners(founds: Sequence[Collection[str]]) -> dict[str, int]:
    """Return for each tensor in one of several checkpoints `founds` the number of that it is taken from.

    That is the first which has the parameter: its state comes from there too or not at all, since another's is of other values.
    """
    found: dict[str, int] = {}
    of_parameter: dict[str, int] = {}
    for number, names in enumerate(founds):
        for name in names:
            if name.startswith(_MODEL):
                of_parameter.setdefault(name.removeprefix(_MODEL), number)
        for name in names:
            parameter = name.removeprefix(_MODEL) if name.startswith(_MODEL) else name.split("/", 2)[-1]
            if of_parameter.get(parameter, number) == number:
                found.setdefault(name, number)
    return found


def listing(found: Sizes, wanted: Sizes, names: Sequence[str]) -> str:
    """Say which parameters and what state of the optimizer are taken when `names` are, and which are not."""
    said = []
    for kind, what in ((_MODEL, "parameters"), (_OPTIMIZER, "tensors of optimizer state")):
        own, there = ([name for name in each if name.startswith(kind)] for each in (wanted, found))
        taken = {name for name in names if name.startswith(kind)}
        said.append(f"{len(taken)} of {len(own)} {what} taken")
        for part, rest in (
            ("begin anew", [name for name in own if name not in taken]),
            ("not taken", [n for n in there if n not in taken]),
        ):
            if rest and kind == _MODEL:
                said.append(f"{part}: {', '.join(name.removeprefix(kind) for name in sorted(rest))}")
    return "; ".join(said)


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the values that differ between two configs, side by side; what only one of them knows is left out."""
    found = []
    for name in there.keys() & here.keys():
        one, other = there[name], here[name]
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, f"{prefix}.{name}")
        elif one != other:
            found.append(f"{prefix}.{name} is {json.dumps(one)} there and {json.dumps(other)} here")
    return sorted(found)


def _one_sided(found: Sizes, wanted: Sizes, name: str, rules: Rules) -> bool:
    """Return whether `name` may be on one side alone; of what is on both, only what is ignored may differ."""
    there, here = name in found, name in wanted
    return rules.allows(name, there=there, here=here) and (not (there and here) or not rules.takes(name))


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name.rpartition("/")[2]) for pattern in patterns)


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
