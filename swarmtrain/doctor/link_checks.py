"""Checks on the network links between nodes, as measured by both ends, and on the first collective of all nodes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from swarmtrain.doctor.probe_results import CHECKS, NodeFacts, ProbeResults, format_bandwidth
from swarmtrain.launchers.base import Finding

_MAX_NAME_LOOKUP_SECONDS = 1.0
_ETHERNET_MTU = 1500
_SLOW_BANDWIDTH_FACTOR = 3.0
"""A link is slow if it has less than 1/3 of the median bandwidth of the faster half of the links."""
_SLOW_LATENCY_FACTOR = 5.0
_MIN_NOTICED_LATENCY_SECONDS = 0.002
_UNKNOWN_INTERFACE_REASON = "NCCL and gloo would choose an interface themselves, and hang if it is the wrong one"


@CHECKS("names", "every node resolves the names of all others without delay")
def _check_name_resolution(results: ProbeResults) -> Iterator[Finding]:
    for name, facts in results.nodes.items():
        slow_lookups = {
            peer: seconds for peer, seconds in facts["names"].items() if seconds is not None and seconds > _MAX_NAME_LOOKUP_SECONDS
        }
        if slow_lookups:
            lookup_times = ", ".join(f"{peer} after {seconds:.1f} s" for peer, seconds in slow_lookups.items())
            why = "each new world resolves these names many times"
            yield Finding(
                results.describe_node(name), f"slow DNS: {lookup_times}", "run systemctl restart docker on that node", fatal=False, why=why
            )


@CHECKS("interface", "the interface to the peers is known, and has the same MTU on all nodes")
def _check_interfaces(results: ProbeResults) -> Iterator[Finding]:
    mtus = {name: facts["interfaces"].get(facts["interface"]) for name, facts in results.nodes.items()}
    for name, mtu in mtus.items():
        if mtu is None:
            hint = "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in runner.env"
            yield Finding(
                results.describe_node(name),
                f"no interface has the address {results.nodes[name]['address']}",
                hint,
                why=_UNKNOWN_INTERFACE_REASON,
            )
    if len(set(mtus.values()) - {None}) > 1:
        mtus_text = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
        hint = "run swarmtrain down, then set runner.swarm.mtu to use one MTU on all nodes"
        yield Finding("network", f"the MTUs differ: {mtus_text}", hint, fatal=False, why="packets that exceed the smaller MTU are dropped")


@CHECKS("links", "every pair of nodes can communicate")
def _check_links(results: ProbeResults) -> Iterator[Finding]:
    for link in results.links:
        if link["error"] and not _is_limited_by_mtu(results, link):
            hint = "open TCP and UDP 7946 and UDP 4789 between the two machines, in both directions"
            yield Finding(_describe_link(results, link), str(link["error"]), hint, why="the first collective would block until its timeout")


@CHECKS("packets", "packets of the interface's MTU arrive")
def _check_packet_sizes(results: ProbeResults) -> Iterator[Finding]:
    for link in results.links:
        if _is_limited_by_mtu(results, link):
            message = f"packets over {link['largest_packet']} bytes are lost, but the interface MTU is {_get_link_mtu(results, link)}"
            overlay_overhead = (results.plan.config.runner.swarm.mtu or _ETHERNET_MTU) - _get_link_mtu(
                results, link
            )  # bytes that the overlay network adds to each packet
            hint = f"swarmtrain down {results.plan.run}; then deploy with -o runner.swarm.mtu={link['largest_packet'] + overlay_overhead}"
            yield Finding(
                _describe_link(results, link), message, hint, why="small messages pass and large ones hang: jobs start and then stall"
            )


@CHECKS("bandwidth", "no link is much slower than the others")
def _check_bandwidth(results: ProbeResults) -> Iterator[Finding]:
    # With three nodes, one slow node slows down two of the three links, so the typical rate is the median of the faster half.
    rates = sorted(rate for link in results.working_links for rate in (link["forward_bandwidth"], link["backward_bandwidth"]))
    typical_rate = statistics.median(rates[len(rates) // 2 :] or [0.0])
    for link in results.working_links:
        slowest = min(link["forward_bandwidth"], link["backward_bandwidth"])
        if len(results.working_links) > 1 and slowest * _SLOW_BANDWIDTH_FACTOR < typical_rate:
            hint = "run ethtool INTERFACE on both machines to see the negotiated link speed"
            message = (
                f"carries {format_bandwidth(slowest)}, but the median of the faster half of the links is {format_bandwidth(typical_rate)}"
            )
            yield Finding(_describe_link(results, link), message, hint, fatal=False, why="all nodes wait for the slowest link at each step")


@CHECKS("latency", "no link has a much higher latency than the others")
def _check_latency(results: ProbeResults) -> Iterator[Finding]:
    typical_round_trip = statistics.median([link["round_trip"] for link in results.working_links] or [0.0])
    for link in results.working_links:
        if link["round_trip"] > max(_SLOW_LATENCY_FACTOR * typical_round_trip, _MIN_NOTICED_LATENCY_SECONDS):
            message = f"has a round-trip time of {link['round_trip'] * 1e3:.1f} ms, but the median is {typical_round_trip * 1e3:.2f} ms"
            hint = "run mtr between the two machines to see the route of the packets"
            yield Finding(
                _describe_link(results, link),
                message,
                hint,
                fatal=False,
                why="tensor parallelism waits for many round trips per layer",
            )


@CHECKS("all-reduce", "an all-reduce across all nodes works")
def _check_all_reduce(results: ProbeResults) -> Iterator[Finding]:
    failed = {name: facts["error"] for name, facts in results.collective_results.items() if "error" in facts}
    if failed:
        name, error = next(iter(failed.items()))
        hint = "fix the findings above, the likely cause; otherwise deploy with NCCL_DEBUG: INFO in runner.env and read swarmtrain logs"
        others_text = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        yield Finding(
            f"{results.describe_node(name)}{others_text}", f"the all-reduce failed: {error}", hint, why="every training step needs it"
        )


def _describe_link(results: ProbeResults, link: NodeFacts) -> str:
    return f"link {results.describe_node(link['a'])} to {results.describe_node(link['b'])}"


def _is_limited_by_mtu(results: ProbeResults, link: NodeFacts) -> bool:
    """Return whether small packets pass the link, but packets as large as the MTU of the interfaces do not."""
    return bool(0 < link["largest_packet"] < _get_link_mtu(results, link))


def _get_link_mtu(results: ProbeResults, link: NodeFacts) -> int:
    """Return the MTU of the link in bytes: the largest packet that the interfaces of both ends can send."""
    return min(_get_interface_mtu(results, link[end]) for end in "ab")


def _get_interface_mtu(results: ProbeResults, node_name: str) -> int:
    facts = results.nodes.get(node_name, {})
    return int(facts.get("interfaces", {}).get(facts.get("interface"), 0))
