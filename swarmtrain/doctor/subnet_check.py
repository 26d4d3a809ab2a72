"""Check of the overlay network's subnet: containers cannot reach other machines with addresses in it."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

from swarmtrain.config.schema.fields.overlay_subnet import draw_large_subnet, suggest_subnet
from swarmtrain.doctor.probe_results import CHECKS, ProbeResults
from swarmtrain.launchers.base import Finding

# Swarm assigns the subnets of its pool one after the other: the next runs get subnets near the one of the probe.
_NEIGHBORHOOD_PREFIX = 16
_DEFAULT_PREFIX = 24


@CHECKS("subnet", "the overlay network contains no address of a machine or of a DNS resolver")
def _check_overlay_subnet(results: ProbeResults) -> Iterator[Finding]:
    configured = _get_configured_subnet(results)
    overlay = configured or _find_next_subnets(results)
    addresses = _describe_outside_addresses(results)
    shadowed = [text for text, address in addresses.items() if overlay and IPv4Address(address) in overlay]
    if not shadowed:
        return
    taken = [*results.swarm_subnets, *addresses.values()]
    free_subnet = suggest_subnet(results.plan.run, configured.prefixlen if configured else _DEFAULT_PREFIX, taken) or "SUBNET"
    yield Finding(
        f"network {overlay}",
        f"contains {'; '.join(shadowed)}" + ("" if configured else "; Swarm assigns the subnets of the next runs from this range"),
        f"set runner.swarm.subnet: {free_subnet}; if the run is up: swarmtrain down {results.plan.run}, then deploy again",
        fatal=False,
        why="a container can reach addresses in the subnet of its overlay network only there: such a machine is unreachable from it, and "
        "with such a resolver it cannot resolve names outside of the run",
    )


def _get_configured_subnet(results: ProbeResults) -> IPv4Network | None:
    """Return the subnet of the run's own overlay network; None if Swarm assigns it, or the run has no own overlay network."""
    swarm = results.plan.config.runner.swarm
    if swarm.network is not None:
        return None
    subnet = swarm.subnet or draw_large_subnet(results.plan.run, results.plan.max_nodes)
    return IPv4Network(subnet) if subnet else None


def _find_next_subnets(results: ProbeResults) -> IPv4Network | None:
    """Return the range from which Swarm assigns the next subnets: that around the probe's. None if the run has no own overlay network."""
    if results.plan.config.runner.swarm.network is not None:
        return None
    networks = [facts.get("networks", {}).get(facts["interface"]) for facts in results.nodes.values()]
    probed = next((IPv4Network(network) for network in networks if network), None)
    return probed.supernet(new_prefix=min(probed.prefixlen, _NEIGHBORHOOD_PREFIX)) if probed else None


def _describe_outside_addresses(results: ProbeResults) -> dict[str, str]:
    """Return the IPv4 addresses outside of the run that containers may have to reach, each by a text that says whose it is."""
    # The probe of an image with an older version of swarmtrain reports no resolvers.
    addresses = {f"{address}, the address of {host}": address for host, address in results.machine_addresses.items()}
    for name, facts in results.nodes.items():
        addresses |= {f"{address}, a DNS resolver of {results.describe_node(name)}": address for address in facts.get("resolvers", ())}
    return {text: address for text, address in addresses.items() if _is_ipv4_address(address)}


def _is_ipv4_address(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:  # an IPv6 address, a host name, or an address that the swarm does not know yet
        return False
    return True
