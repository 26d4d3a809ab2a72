"""The memory that a config needs: asked of the trainer, and told as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers import verbs

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_SPARE = 0.9
"""The part of a device's memory that tensors can fill: the rest is CUDA's own, NCCL's, and lost between pieces."""


@dataclass(frozen=True)
class Memory:
    """What each kind of rank needs, what the device has, and what would need less; in bytes."""

    world_size: int
    ranks: Sequence[Mapping[str, Any]]
    device: int | None
    alternatives: Sequence[Mapping[str, Any]]

    @property
    def worst(self) -> Mapping[str, Any]:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: int(rank["peak"]))

    @property
    def fits(self) -> bool:
        """True if the worst rank fits, or there is nothing to compare it with."""
        return self.device is None or int(self.worst["peak"]) <= _SPARE * self.device

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs, for --json."""
        told = [{**change, "fits": self.device is None or change["peak"] <= _SPARE * self.device} for change in self.alternatives]
        return {
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "worst": self.worst["rank"],
            "device_memory": self.device,
            "fits": self.fits,
            "alternatives": told,
        }

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(kind for rank in self.ranks for kind in rank["parts"]))
        shown = [kind for kind in kinds if any(rank["parts"].get(kind, 0) >= 2**15 for rank in self.ranks)]
        rows = [("", *(_named(rank, len(self.ranks)) for rank in self.ranks))]
        rows += [(kind, *(_told(rank["parts"].get(kind, 0)) for rank in self.ranks)) for kind in shown]
        rows += [("peak of a step", *(_told(rank["peak"]) for rank in self.ranks))]
        rows += [("while it starts", *(_told(rank["start"]) for rank in self.ranks))]
        lines = [f"memory of each rank, in a world of {self.world_size}", *_table(rows)]
        return "\n".join([*lines, *self._verdict()])

    def _verdict(self) -> list[str]:
        if self.device is None:
            return []
        need, room = int(self.worst["peak"]), int(_SPARE * self.device)
        device = f"a device of {_told(self.device)}, of which tensors can fill {_told(room)}"
        if self.fits:
            return [f"fits {device}"]
        lines = [f"does not fit {device}: {_told(need - room)} too much"]
        lesser = [change for change in self.alternatives if change["peak"] < need]
        rows = [
            (" ".join(f"-o {part}" for part in change["changes"]), _told(change["peak"]), "fits" if change["peak"] <= room else "")
            for change in sorted(lesser, key=lambda change: int(change["peak"]))
        ]
        return [*lines, "it would need", *_table(rows)] if rows else [*lines, "nothing that was tried needs less"]


def ask(config: Config, ranks: int, device: int | None) -> Memory:
    """Return what `config` needs in a world of `ranks`. Raises SwarmtrainError if torch is not here, or cannot tell."""
    question = {"config": config.to_json(), "ranks": ranks, "room": None if device is None else int(_SPARE * device)}
    answer = verbs.ask("memory", question)
    return Memory(ranks, answer["ranks"], device, answer["alternatives"])


def size(text: str, option: str = "--device-memory") -> int:
    """Return the bytes in 80GiB, 80G, 512M, as `option` was given. Raises SwarmtrainError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SwarmtrainError(f"{text!r} is no size", place=option, hint="write 80GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _named(rank: Mapping[str, Any], of: int) -> str:
    stages = rank["stages"]
    return "every rank" if of == 1 else f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [line.rstrip() for line in lines]


def _told(size: float) -> str:
    unit, word = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.1f} {word}"
