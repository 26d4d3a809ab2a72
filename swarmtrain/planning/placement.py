"""Assign the nodes of a run to machines. A node keeps its machine while the machine is listed and available: it is not restarted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

_NODE_PREFIX = "node"
MachineT = TypeVar("MachineT")


@dataclass(frozen=True)
class Placement:
    """Machines of an existing run, each by its id or its host name."""

    machines: Mapping[str, str] = field(default_factory=dict)
    """Machine of each node, by the name of the node."""
    coordinator: str = ""
    """Machine of the coordinator, if it is fixed; else empty."""

    def is_machine_of(self, node: str, *machine_names: str) -> bool:
        """Return whether one of `machine_names`, the id and the host name of a machine, is the machine of `node`."""
        return node in self.machines and self.machines[node] in machine_names


FRESH_PLACEMENT = Placement()
"""Placement of a run that does not exist yet."""


def assign_nodes(
    machines: Sequence[MachineT], machine_names: Sequence[Iterable[str]], node_count: int, placement: Placement
) -> list[tuple[str, MachineT]]:
    """Return the names of `node_count` nodes with their machines, from `machines`, which are listed and available, in the order of use.

    `machine_names` are the id and the host name of each machine. A node keeps its machine; if there are too many nodes, those with the
    highest numbers are removed. Other machines get the lowest numbers that are free. The result is ordered by number, and shorter than
    `node_count` if there are too few machines.
    """
    numbers_by_name = {name: _parse_node_number(node) for node, name in placement.machines.items()}
    kept: dict[int, MachineT] = {}
    others: list[MachineT] = []
    for machine, names in zip(machines, machine_names, strict=True):
        number = next((numbers_by_name[name] for name in names if name in numbers_by_name), None)
        if number is None or number in kept:
            others.append(machine)
        else:
            kept[number] = machine
    assigned = {number: kept[number] for number in sorted(kept)[:node_count]}
    new_count = min(node_count - len(assigned), len(others))
    free_numbers = [number for number in range(len(assigned) + new_count) if number not in assigned][:new_count]
    assigned |= zip(free_numbers, others, strict=False)
    return [(f"{_NODE_PREFIX}{number}", assigned[number]) for number in sorted(assigned)]


def _parse_node_number(node_name: str) -> int:
    return int(node_name.removeprefix(_NODE_PREFIX))
