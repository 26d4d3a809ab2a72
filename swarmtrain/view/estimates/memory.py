"""Memory that a config needs per rank, estimated by the trainer and formatted as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers.common import trainer_subprocess

_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_USABLE_FRACTION = 0.9
"""Usable fraction of a device's memory. The rest is used by CUDA and NCCL, or lost to fragmentation."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate in bytes, for a world of `world_size` ranks, and the memory of a device (None: unknown).

    `ranks` contains one estimate per group of ranks with the same pipeline stages, `alternatives` one per change of the config.
    """

    world_size: int
    ranks: Sequence[Mapping[str, Any]]
    device_memory: int | None
    alternatives: Sequence[Mapping[str, Any]]

    @property
    def worst_rank(self) -> Mapping[str, Any]:
        """Estimate of the rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: int(rank["peak"]))

    @property
    def fits(self) -> bool:
        """Whether the worst rank fits into the device's memory; True if the device's memory is unknown."""
        return self.device_memory is None or int(self.worst_rank["peak"]) <= _USABLE_FRACTION * self.device_memory

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as a JSON-compatible dict, for `--json`."""
        alternatives = [
            {**change, "fits": self.device_memory is None or change["peak"] <= _USABLE_FRACTION * self.device_memory}
            for change in self.alternatives
        ]
        return {
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "worst": self.worst_rank["rank"],
            "device_memory": self.device_memory,
            "fits": self.fits,
            "alternatives": alternatives,
        }

    def __str__(self) -> str:
        categories = list(dict.fromkeys(category for rank in self.ranks for category in rank["memory_by_category"]))
        shown_categories = [
            category for category in categories if any(rank["memory_by_category"].get(category, 0) >= 2**15 for rank in self.ranks)
        ]
        rows = [("", *(_label_rank(rank, len(self.ranks)) for rank in self.ranks))]
        rows += [
            (category, *(_format_size(rank["memory_by_category"].get(category, 0)) for rank in self.ranks)) for category in shown_categories
        ]
        rows += [("peak during a step", *(_format_size(rank["peak"]) for rank in self.ranks))]
        rows += [("peak during startup", *(_format_size(rank["startup_peak"]) for rank in self.ranks))]
        lines = [f"memory of each rank, with a world size of {self.world_size}", *_format_rank_table(rows)]
        return "\n".join([*lines, *self._format_memory_fit()])

    def _format_memory_fit(self) -> list[str]:
        if self.device_memory is None:
            return []
        needed_bytes, usable_bytes = int(self.worst_rank["peak"]), int(_USABLE_FRACTION * self.device_memory)
        device_text = f"a device of {_format_size(self.device_memory)}, of which tensors can fill {_format_size(usable_bytes)}"
        if self.fits:
            return [f"fits {device_text}"]
        lines = [f"does not fit {device_text}: {_format_size(needed_bytes - usable_bytes)} too much"]
        smaller = [change for change in self.alternatives if change["peak"] < needed_bytes]
        rows = [
            (
                " ".join(f"-o {override}" for override in change["changes"]),
                _format_size(change["peak"]),
                "fits" if change["peak"] <= usable_bytes else "",
            )
            for change in sorted(smaller, key=lambda change: int(change["peak"]))
        ]
        return (
            [*lines, "peak with other settings:", *_format_rank_table(rows)]
            if rows
            else [*lines, "none of the tested settings needs less memory"]
        )


def estimate_memory(config: Config, world_size: int, device_memory: int | None) -> MemoryEstimate:
    """Return the estimate of the memory that `config` needs in a world of `world_size` ranks.

    Raises SwarmtrainError if torch is not installed on this machine, or the trainer cannot estimate this config.
    """
    request = {
        "config": config.to_json(),
        "ranks": world_size,
        "available_bytes": None if device_memory is None else int(_USABLE_FRACTION * device_memory),
    }
    response = trainer_subprocess.query_trainer("memory", request)
    return MemoryEstimate(world_size, response["ranks"], device_memory, response["alternatives"])


def parse_size(text: str, option: str = "--device-memory") -> int:
    """Return the size `text` (80GiB, 80G, 512M), the value of `option`, in bytes. Raises SwarmtrainError if it is invalid."""
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise SwarmtrainError(f"{text!r} is not a valid size", place=option, hint="use a size such as 80GiB or 512MiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def _label_rank(rank: Mapping[str, Any], rank_group_count: int) -> str:
    stages = rank["stages"]
    return "every rank" if rank_group_count == 1 else f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _format_rank_table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [line.rstrip() for line in lines]


def _format_size(size: float) -> str:
    unit, unit_name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.1f} {unit_name}"
