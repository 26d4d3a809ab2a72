"""Keep what the probes have measured, for the estimates of `swarmtrain plan`."""

from __future__ import annotations

import time

from swarmtrain.doctor.probe_results import NodeFacts, ProbeResults, find_all_reduce_timings
from swarmtrain.planning.step_estimates import AllReduceTime, ClusterMeasurement, ModelStepTimes, RankStepTime, compute_step_digest


def build_measurement(results: ProbeResults) -> ClusterMeasurement:
    """Return the measurement in the results of a probe."""
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
