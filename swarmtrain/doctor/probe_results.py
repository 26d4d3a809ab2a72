"""Results of the probes, which ran on every node in the job's own image, network, mounts and reservations, and what plans use of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.launchers.common.checks import CheckRegistry
from swarmtrain.planning.plan import Plan
from swarmtrain.planning.step_estimates import AllReduceTime, ClusterMeasurement, ModelStepTimes, RankStepTime, compute_step_digest

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


def build_measurement(results: ProbeResults) -> ClusterMeasurement:
    """Return the measurement in the results of a probe, from which later plans estimate step times."""
    hosts = {node.name: node.host for node in results.plan.nodes}
    links = {
        (hosts[link["a"]], hosts[link["b"]]): min(link["forward_bandwidth"], link["backward_bandwidth"]) for link in results.working_links
    }
    return ClusterMeasurement(time.time(), tuple(hosts.values()), _find_all_reduce_time(results), links, _find_step_times(results, hosts))


def _find_all_reduce_time(results: ProbeResults) -> AllReduceTime | None:
    """Return the time of an all-reduce as the ranks run it: on GPUs if they have any."""
    node_count = len(results.collective_results)
    for backend in ("nccl", "gloo"):
        timings = find_all_reduce_timings(results, backend)
        if timings and node_count > 1:
            return _fit_all_reduce_time(timings, node_count, on_gpus=backend == "nccl")
    return None


def _fit_all_reduce_time(timings: NodeFacts, node_count: int, *, on_gpus: bool) -> AllReduceTime:
    size, seconds, large_size, large_seconds = (float(timings[key]) for key in ("bytes", "seconds", "large_bytes", "large_seconds"))
    if large_size == size or large_seconds <= seconds:
        return AllReduceTime(node_count, 0.0, large_size / large_seconds, on_gpus)
    rate = (large_size - size) / (large_seconds - seconds)
    return AllReduceTime(node_count, max(0.0, seconds - size / rate), rate, on_gpus)


def _find_step_times(results: ProbeResults, hosts: dict[str, str]) -> ModelStepTimes | None:
    """Return the step times, if all nodes have measured them."""
    times = results.step_times
    if times.keys() < hosts.keys() or any("error" in each for each in times.values()) or not times:
        return None
    nodes = {hosts[name]: RankStepTime(each["micro_batch_seconds"], each["step_seconds"]) for name, each in times.items()}
    first = next(iter(times.values()))
    return ModelStepTimes(compute_step_digest(results.plan.config), first["trainable_parameters"], first["low_rank_values"], nodes)
