"""Results of the probes, which ran on every node in the job's own image, network, mounts and reservations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.launchers.common.checks import CheckRegistry
from swarmtrain.planning.plan import Plan

NodeFacts = Mapping[str, Any]


@dataclass(frozen=True)
class ProbeResults:
    """Results of the probes by planned node name. Link results have the fields of swarmtrain.entrypoint.probe.link_probe.Link."""

    plan: Plan
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    links: tuple[NodeFacts, ...] = ()
    collective_results: Mapping[str, NodeFacts] = field(default_factory=dict)
    failure_reason: str = ""
    """Why the probe was aborted; empty if it was completed."""
    service_states: Mapping[str, str] = field(default_factory=dict)
    """The final state of each node's service, as reported by the launcher."""
    step_times: Mapping[str, NodeFacts] = field(default_factory=dict)
    """Results of swarmtrain.entrypoint.probe.step_time_probe; empty if they were not requested."""
    image: str = ""
    """The job's image with the digest from its registry at the start of the probe."""
    machine_addresses: Mapping[str, str] = field(default_factory=dict)
    """The address that each machine of the swarm advertises, by host name."""
    swarm_subnets: tuple[str, ...] = ()
    """The subnets of the swarm's networks, in CIDR notation."""

    @property
    def working_links(self) -> list[NodeFacts]:
        """The links whose measurement succeeded."""
        return [link for link in self.links if not link["error"]]

    def describe_node(self, name: str) -> str:
        """Return a text with the node name `name` and the host name of the node's machine."""
        host = next((node.host for node in self.plan.nodes if node.name == name), "")
        return f"{name} on {host}"


def find_all_reduce_timings(results: ProbeResults, backend: str) -> NodeFacts | None:
    """Return the all-reduce timings over `backend` of the node that took longest; None if there are none."""
    timings = [facts[backend] for facts in results.collective_results.values() if backend in facts]
    return max(timings, key=lambda each: float(each["large_seconds"]), default=None)


CHECKS: CheckRegistry[ProbeResults] = CheckRegistry()


def format_bandwidth(rate: float) -> str:
    """Return the bandwidth `rate`, in bytes per second, as text in Gbit/s or Mbit/s."""
    bits_per_second = rate * 8
    return f"{bits_per_second / 1e9:.1f} Gbit/s" if bits_per_second >= 1e9 else f"{bits_per_second / 1e6:.0f} Mbit/s"
