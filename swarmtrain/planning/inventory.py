"""Inventory: the machines on which a launcher can start the nodes of a run, with their state."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner import RunnerConfig

_NODE_ID_PATTERN = re.compile(r"[a-z0-9]{25}")


@dataclass(frozen=True)
class Machine:
    """One machine on which a launcher can start a node."""

    host: str
    id: str = ""
    address: str = ""
    is_manager: bool = False
    unavailable_reason: str = ""
    """Why no node can be started on this machine (for example `down`, `drained`); empty if one can."""
    unavailable_hint: str = ""
    """What makes an unavailable machine available, preferably a command."""
    is_unknown: bool = False
    """Whether no machine of this name is known: the name may be misspelled."""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)
    """Amounts of generic resources by kind, for example NVIDIA-GPU: 8."""
    gpu_count: int | None = None
    """Number of GPUs when the machine was last probed; None if that is unknown."""
    cores: float = 0.0
    """Number of cores; 0 if it is unknown."""
    engine: str = ""

    def count_gpus(self, kind: str) -> int:
        """Return the number of known GPUs: those declared as generic resources of `kind`, or those of the last probe."""
        return self.resources.get(kind, 0) or self.gpu_count or 0


@dataclass(frozen=True)
class Inventory:
    """The machines on which a launcher can start nodes, in the order of use, and their origin, which messages name."""

    origin: str
    machines: tuple[Machine, ...]

    def restrict(self, machine_ids: Collection[str], reason: str) -> Inventory:
        """Return the inventory in which only the machines with these ids are available. `reason`: why the others are not."""
        machines = [
            machine if machine.id in machine_ids or machine.unavailable_reason else replace(machine, unavailable_reason=reason)
            for machine in self.machines
        ]
        return Inventory(self.origin, tuple(machines))


def build_offline_inventory(hosts: Iterable[HostEntry]) -> Inventory:
    """Return the inventory of `hosts`, for a plan without access to a cluster."""
    machines = tuple(Machine(host=host.name, id=host.name if is_node_id(host.name) else "") for host in hosts)
    return Inventory("the hosts that the config lists", machines)


def build_placeholder_inventory(runner: RunnerConfig) -> Inventory:
    """Return an inventory of machines with the placeholder names HOST0, HOST1, …, for a plan without access to a cluster.

    They have the labels in `runner`, and there are as many as its nodes.
    """
    _, node_count, _ = runner.node_range
    return Inventory("placeholder hosts", tuple(Machine(host=f"HOST{index}", labels=runner.swarm.labels) for index in range(node_count)))


def is_node_id(name: str) -> bool:
    """Return whether `name` has the form of the id of a swarm node."""
    return bool(_NODE_ID_PATTERN.fullmatch(name))
