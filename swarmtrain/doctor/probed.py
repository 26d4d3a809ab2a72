"""What the probes can tell: they ran on every node, in the job's own image, network, mounts and reservations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.doctor.checks import Checks
from swarmtrain.plan import Plan

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Probed:
    """What came of a probe, by the names of the plan's nodes; of pairs, the fields of swarmtrain.entrypoint.links.Link."""

    plan: Plan
    nodes: Mapping[str, Facts] = field(default_factory=dict)
    links: tuple[Facts, ...] = ()
    together: Mapping[str, Facts] = field(default_factory=dict)
    verdict: str = ""
    """Why the probe was given up, if it was."""
    states: Mapping[str, str] = field(default_factory=dict)
    """How each node's service stood at the end, in the launcher's words."""
    image: str = ""
    """The job's image with its digest, as its registry had it when the probe began."""

    @property
    def sound(self) -> list[Facts]:
        """The links over which data went."""
        return [link for link in self.links if not link["error"]]

    def place(self, name: str) -> str:
        """Return a node's name with its host's."""
        host = next((node.host for node in self.plan.nodes if node.name == name), "")
        return f"{name} on {host}"


CHECKS: Checks[Probed] = Checks()


def bits(rate: float) -> str:
    """Return bytes per second as people speak of networks."""
    value = rate * 8
    return f"{value / 1e9:.1f} Gbit/s" if value >= 1e9 else f"{value / 1e6:.0f} Mbit/s"
