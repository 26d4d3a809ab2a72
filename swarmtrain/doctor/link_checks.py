"""Checks on how the nodes reach each other, as both ends of each link measured it, and all nodes together."""

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
_UNKNOWN_INTERFACE_REASON = "NCCL and gloo would choose one, and hang if it is the wrong one"


@CHECKS("names", "every node finds every other by name, at once")
def _check_names(results: ProbeResults) -> Iterator[Finding]:
    for name, facts in results.nodes.items():
        slow_lookups = {
            peer: seconds for peer, seconds in facts["names"].items() if seconds is not None and seconds > _MAX_NAME_LOOKUP_SECONDS
        }
        if slow_lookups:
            lookup_times = ", ".join(f"{peer} after {seconds:.1f} s" for peer, seconds in slow_lookups.items())
            why = "every start of a world asks for these names, many times"
            yield Finding(results.describe_node(name), f"finds {lookup_times}", "systemctl restart docker, there", fatal=False, why=why)


@CHECKS("interface", "the interface that leads to the peers is known, and has one packet size everywhere")
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
        hint = "runner.swarm.mtu sets one for all, after swarmtrain down"
        yield Finding("network", f"the largest packets differ: {mtus_text}", hint, fatal=False, why="the larger ones are lost on their way")


@CHECKS("links", "every pair of nodes reaches each other")
def _check_links(results: ProbeResults) -> Iterator[Finding]:
    for link in results.links:
        if link["error"] and not _is_limited_by_mtu(results, link):
            hint = "open TCP and UDP 7946 and UDP 4789 between the two machines, in both directions"
            yield Finding(
                _describe_link(results, link), str(link["error"]), hint, why="the first collective would wait for it until its timeout"
            )


@CHECKS("packets", "packets as large as the interface sends arrive")
def _check_packet_sizes(results: ProbeResults) -> Iterator[Finding]:
    for link in results.links:
        if _is_limited_by_mtu(results, link):
            message = f"packets over {link['largest_packet']} bytes are lost, and the interface sends {_get_link_mtu(results, link)}"
            overlay_overhead = (results.plan.config.runner.swarm.mtu or _ETHERNET_MTU) - _get_link_mtu(
                results, link
            )  # what the overlay adds to each packet
            hint = f"swarmtrain down {results.plan.run}; then deploy with -o runner.swarm.mtu={link['largest_packet'] + overlay_overhead}"
            yield Finding(
                _describe_link(results, link), message, hint, why="small messages pass and large ones hang: jobs start and then stall"
            )


@CHECKS("bandwidth", "no link is much slower than the others")
def _check_bandwidth(results: ProbeResults) -> Iterator[Finding]:
    # A single slow node slows down two of three links, so the typical rate is that of the faster half.
    rates = sorted(rate for link in results.working_links for rate in (link["forward_bandwidth"], link["backward_bandwidth"]))
    typical_rate = statistics.median(rates[len(rates) // 2 :] or [0.0])
    for link in results.working_links:
        slowest = min(link["forward_bandwidth"], link["backward_bandwidth"])
        if len(results.working_links) > 1 and slowest * _SLOW_BANDWIDTH_FACTOR < typical_rate:
            hint = "ethtool INTERFACE on both machines shows what their links have agreed on"
            message = f"carries {format_bandwidth(slowest)}, where the faster half of the links has {format_bandwidth(typical_rate)}"
            yield Finding(_describe_link(results, link), message, hint, fatal=False, why="all nodes wait for the slowest link at each step")


@CHECKS("latency", "no link answers much later than the others")
def _check_latency(results: ProbeResults) -> Iterator[Finding]:
    typical_round_trip = statistics.median([link["round_trip"] for link in results.working_links] or [0.0])
    for link in results.working_links:
        if link["round_trip"] > max(_SLOW_LATENCY_FACTOR * typical_round_trip, _MIN_NOTICED_LATENCY_SECONDS):
            message = f"answers after {link['round_trip'] * 1e3:.1f} ms, where the median is {typical_round_trip * 1e3:.2f} ms"
            hint = "mtr between the two machines shows the way that packets take"
            yield Finding(
                _describe_link(results, link),
                message,
                hint,
                fatal=False,
                why="tensor parallelism waits for a round trip many times a layer",
            )


@CHECKS("all-reduce", "an all-reduce of all nodes works")
def _check_all_reduce(results: ProbeResults) -> Iterator[Finding]:
    failed = {name: facts["error"] for name, facts in results.collective_results.items() if "error" in facts}
    if failed:
        name, error = next(iter(failed.items()))
        hint = "the findings above are the likely cause; else swarmtrain logs of a run with NCCL_DEBUG: INFO in runner.env"
        others_text = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        yield Finding(
            f"{results.describe_node(name)}{others_text}", f"no all-reduce: {error}", hint, why="it is the first thing that every step does"
        )


def _describe_link(results: ProbeResults, link: NodeFacts) -> str:
    return f"link {results.describe_node(link['a'])} to {results.describe_node(link['b'])}"


def _is_limited_by_mtu(results: ProbeResults, link: NodeFacts) -> bool:
    """Return whether packets arrive, but not the largest that the interfaces send."""
    return bool(0 < link["largest_packet"] < _get_link_mtu(results, link))


def _get_link_mtu(results: ProbeResults, link: NodeFacts) -> int:
    """Return the size in bytes of the largest packet that the interfaces of both ends send."""
    return min(_get_interface_mtu(results, link[end]) for end in "ab")


def _get_interface_mtu(results: ProbeResults, name: str) -> int:
    facts = results.nodes.get(name, {})
    return int(facts.get("interfaces", {}).get(facts.get("interface"), 0))
