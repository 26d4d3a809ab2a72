"""How the nodes reach each other, as the two ends of each link measured it, and all of them together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from swarmtrain.doctor.probed import CHECKS, Facts, Probed, bits
from swarmtrain.launchers.base import Finding

_NAME = 1.0
_ETHERNET = 1500
_SLOW = 3.0
"""A link is slow if it has less than a third of what the faster half of the links has."""
_SLUGGISH = 5.0
_NOTICED = 0.002
_WRONG_INTERFACE = "NCCL and gloo would choose one, and hang if it is the wrong one"


@CHECKS("names", "every node finds every other by name, at once")
def _names(seen: Probed) -> Iterator[Finding]:
    for name, facts in seen.nodes.items():
        slow = {peer: seconds for peer, seconds in facts["names"].items() if seconds is not None and seconds > _NAME}
        if slow:
            told = ", ".join(f"{peer} after {seconds:.1f} s" for peer, seconds in slow.items())
            why = "every start of a world asks for these names, many times"
            yield Finding(seen.place(name), f"finds {told}", "systemctl restart docker, there", fatal=False, why=why)


@CHECKS("interface", "the interface that leads to the peers is known, and has one packet size everywhere")
def _interface(seen: Probed) -> Iterator[Finding]:
    sizes = {name: facts["interfaces"].get(facts["interface"]) for name, facts in seen.nodes.items()}
    for name, size in sizes.items():
        if size is None:
            hint = "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in runner.env"
            yield Finding(seen.place(name), f"no interface has the address {seen.nodes[name]['address']}", hint, why=_WRONG_INTERFACE)
    if len(set(sizes.values()) - {None}) > 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        hint = "runner.swarm.mtu sets one for all, after swarmtrain down"
        yield Finding("network", f"the largest packets differ: {told}", hint, fatal=False, why="the larger ones are lost on their way")


@CHECKS("links", "every pair of nodes reaches each other")
def _links(seen: Probed) -> Iterator[Finding]:
    for link in seen.links:
        if link["error"] and not _small(seen, link):
            hint = "open TCP and UDP 7946 and UDP 4789 between the two machines, in both directions"
            yield Finding(_pair(seen, link), str(link["error"]), hint, why="the first collective would wait for it until its timeout")


@CHECKS("packets", "packets as large as the interface sends arrive")
def _packets(seen: Probed) -> Iterator[Finding]:
    for link in seen.links:
        if _small(seen, link):
            message = f"packets over {link['packet']} bytes are lost, and the interface sends {_sends(seen, link)}"
            beneath = (seen.plan.config.runner.swarm.mtu or _ETHERNET) - _sends(seen, link)  # what the overlay adds to each packet
            hint = f"swarmtrain down {seen.plan.run}; then deploy with -o runner.swarm.mtu={link['packet'] + beneath}"
            yield Finding(_pair(seen, link), message, hint, why="small messages pass and large ones hang: jobs start, and stand still")


@CHECKS("bandwidth", "no link is much slower than the others")
def _bandwidth(seen: Probed) -> Iterator[Finding]:
    # Of three links, a single slow node has two: the faster half tells what is usual.
    rates = sorted(rate for link in seen.sound for rate in (link["there"], link["back"]))
    usual = statistics.median(rates[len(rates) // 2 :] or [0.0])
    for link in seen.sound:
        slowest = min(link["there"], link["back"])
        if len(seen.sound) > 1 and slowest * _SLOW < usual:
            hint = "ethtool INTERFACE on both machines shows what their links have agreed on"
            message = f"carries {bits(slowest)}, where the faster half of the links has {bits(usual)}"
            yield Finding(_pair(seen, link), message, hint, fatal=False, why="all nodes wait for the slowest link at each step")


@CHECKS("latency", "no link answers much later than the others")
def _latency(seen: Probed) -> Iterator[Finding]:
    usual = statistics.median([link["round_trip"] for link in seen.sound] or [0.0])
    for link in seen.sound:
        if link["round_trip"] > max(_SLUGGISH * usual, _NOTICED):
            message = f"answers after {link['round_trip'] * 1e3:.1f} ms, where the median is {usual * 1e3:.2f} ms"
            hint = "mtr between the two machines shows the way that packets take"
            yield Finding(_pair(seen, link), message, hint, fatal=False, why="tensor parallelism waits for a round trip many times a layer")


@CHECKS("together", "an all-reduce of all nodes works")
def _together(seen: Probed) -> Iterator[Finding]:
    failed = {name: facts["error"] for name, facts in seen.together.items() if "error" in facts}
    if failed:
        name, error = next(iter(failed.items()))
        hint = "the findings above are the likely cause; else swarmtrain logs of a run with NCCL_DEBUG: INFO in runner.env"
        others = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        yield Finding(f"{seen.place(name)}{others}", f"no all-reduce: {error}", hint, why="it is the first thing that every step does")


def _pair(seen: Probed, link: Facts) -> str:
    return f"link {seen.place(link['a'])} to {seen.place(link['b'])}"


def _small(seen: Probed, link: Facts) -> bool:
    """Say whether packets arrive, but not the largest."""
    return bool(0 < link["packet"] < _sends(seen, link))


def _sends(seen: Probed, link: Facts) -> int:
    """Return the bytes of the largest packet that both ends' interfaces send."""
    return min(_size(seen, link[end]) for end in "ab")


def _size(seen: Probed, name: str) -> int:
    facts = seen.nodes.get(name, {})
    return int(facts.get("interfaces", {}).get(facts.get("interface"), 0))
