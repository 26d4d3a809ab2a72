"""The lab's network: a bridge in a separate network namespace, and a veth pair from the bridge to each machine.

The bridge's end of a pair is named after its node and lives in the bridge's namespace; the other end is the machine's eth0. Nothing is
added to the host's own network namespace: there, the FORWARD rules of a Docker engine would block traffic between the machines.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import LabError, ProcessError
from swarmtrain.lab.state import LabDescription

REGISTRY_HOST = "registry.lab"
"""Host name of the bridge's address, on which the registry listens."""
_BRIDGE = "bridge"
_PRIVILEGED_HINT = "inside a container, start it with docker run --privileged"
_RATE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def get_namespace_name(lab: str, member: str) -> str:
    """Return the name of the network namespace of a node, or of the bridge if `member` is `bridge`."""
    return f"st-{lab}-{member}"


def get_namespace_path(lab: str, member: str) -> Path:
    """Return the host path of the network namespace of `member`, a node or the `bridge`."""
    return Path("/run/netns") / get_namespace_name(lab, member)


def build_enter_command(lab: str, member: str) -> list[str]:
    """Return the command prefix that runs a command in the network namespace of `member`, a node or the `bridge`.

    The prefix is not `ip netns exec`, which mounts a new /sys in which dockerd does not find the devices cgroup.
    """
    return ["nsenter", f"--net={get_namespace_path(lab, member)}"]


def check_kernel_support() -> None:
    """Check that this kernel can create a network namespace and every kind of link that a lab needs. Raises LabError if not."""
    # Each command has a namespace of its own, without a name, which ends with the command: nothing is left if this process is killed.
    try:
        process.run_command(["unshare", "--net", "true"])
    except ProcessError as error:
        raise LabError(f"cannot create a network namespace: {error.output.strip()}", place="lab", hint=_PRIVILEGED_HINT) from None
    for kind, *settings in (("veth", "peer", "name", "probe1"), ("vxlan", "id", "1", "dstport", "4789"), ("bridge",)):
        try:
            process.run_command(["unshare", "--net", "ip", "link", "add", "probe0", "type", kind, *settings])
        except ProcessError as error:
            message = f"this kernel does not support {kind} links: {error.output.strip()}"
            raise LabError(message, place="lab", hint=f"modprobe {kind}") from None


def create_bridge(description: LabDescription) -> None:
    """Create the bridge and its namespace. Raises LabError if the namespace's name is taken."""
    bridge_namespace = get_namespace_name(description.name, "bridge")
    if bridge_namespace in list_namespaces():
        raise LabError(
            f"namespace {bridge_namespace} already exists, but not from a lab in this directory",
            place="lab",
            hint="use another --name, or set SWARMTRAIN_LAB_DIR to the directory of that lab",
        )
    process.run_command(["ip", "netns", "add", bridge_namespace])
    _run_ip(bridge_namespace, "link", "set", "lo", "up")
    # By default a bridge takes the lowest MAC address of its ports. That changes when a node is killed, and the nodes would not reach
    # the registry until their ARP entry of the old address expires.
    _run_ip(bridge_namespace, "link", "add", _BRIDGE, "address", _derive_mac_address(description.bridge_address), "type", "bridge")
    _run_ip(bridge_namespace, "addr", "add", f"{description.bridge_address}/24", "dev", _BRIDGE)
    _run_ip(bridge_namespace, "link", "set", _BRIDGE, "up")


def connect_node(description: LabDescription, node: str) -> None:
    """Create the node's namespace and its link to the bridge.

    There is no default route: connections to addresses outside the lab fail at once.
    """
    bridge_namespace, node_namespace = get_namespace_name(description.name, "bridge"), get_namespace_name(description.name, node)
    process.run_command(["ip", "netns", "add", node_namespace])
    _run_ip(bridge_namespace, "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", node_namespace)
    _run_ip(bridge_namespace, "link", "set", node, "master", _BRIDGE, "up")
    _run_ip(node_namespace, "link", "set", "lo", "up")
    _run_ip(node_namespace, "link", "set", "eth0", "address", _derive_mac_address(description.get_node_address(node)))
    _run_ip(node_namespace, "addr", "add", f"{description.get_node_address(node)}/24", "dev", "eth0")
    _run_ip(node_namespace, "link", "set", "eth0", "up")


def remove_namespace(lab: str, member: str) -> None:
    """Remove the network namespace of `member`, and the links that end in it. Does nothing if the namespace does not exist."""
    if get_namespace_name(lab, member) in list_namespaces():
        process.run_command(["ip", "netns", "delete", get_namespace_name(lab, member)])


def remove_node_link(lab: str, node: str) -> None:
    """Remove the node's link to the bridge. Does nothing if the link does not exist."""
    node_namespace = get_namespace_name(lab, node)
    with contextlib.suppress(ProcessError):  # if the creation of the namespace was interrupted, only its name exists
        if node_namespace in list_namespaces() and "eth0" in process.run_command(
            ["ip", "-n", node_namespace, "link", "show", "type", "veth"]
        ):
            _run_ip(node_namespace, "link", "delete", "eth0")


def list_namespaces() -> set[str]:
    """Return the names of all network namespaces on this machine."""
    directory = Path("/run/netns")
    return {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()


def set_link_down(lab: str, node: str) -> None:
    """Set the node's link down at the bridge. The machine keeps running, without a network."""
    _run_ip(get_namespace_name(lab, "bridge"), "link", "set", node, "down")


def set_link_up(lab: str, node: str) -> None:
    """Set the node's link up, at full speed."""
    for link_namespace, device in _list_link_endpoints(lab, node):
        process.run_command(["tc", "-n", link_namespace, "qdisc", "replace", "dev", device, "root", "noqueue"])
    _run_ip(get_namespace_name(lab, "bridge"), "link", "set", node, "up")


def limit_link_rate(lab: str, node: str, rate: str) -> None:
    """Limit the node's link to `rate` (`100mbit`, `1gbit`) in both directions. Raises LabError if `rate` is invalid."""
    burst = max(128 * 1024, int(parse_rate(rate) / 8 * 0.004))
    for link_namespace, device in _list_link_endpoints(lab, node):
        shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
        process.run_command(["tc", "-n", link_namespace, "qdisc", "replace", "dev", device, "root", *shape])


def parse_rate(rate: str) -> float:
    """Return the network rate in bits per second. Raises LabError unless `rate` is a positive number followed by kbit, mbit or gbit."""
    match = _RATE_PATTERN.fullmatch(rate)
    if not match or float(match[1]) <= 0:
        raise LabError(
            f"{rate!r} is not a valid rate",
            place="lab throttle --rate",
            hint="use a number with kbit, mbit or gbit, such as 100mbit or 1gbit",
        )
    return float(match[1]) * _RATE_UNITS[match[2]]


def list_link_states(lab: str) -> dict[str, str]:
    """Return the state of each connected node's link: `up`, `down`, or its rate limit in tc's notation."""
    bridge_namespace = get_namespace_name(lab, "bridge")
    links = json.loads(process.run_command(["ip", "-n", bridge_namespace, "-j", "link", "show", "type", "veth"]) or "[]")
    rate_limits = {
        queue["dev"]: f"{queue['options']['rate'] * 8 / 1e6:g}mbit"
        for queue in json.loads(process.run_command(["tc", "-n", bridge_namespace, "-j", "qdisc", "show"]) or "[]")
        if queue["kind"] == "tbf"
    }
    return {
        link["ifname"]: rate_limits.get(link["ifname"], "up") if "UP" in link["flags"] else "down" for link in links if "ifname" in link
    }


def _list_link_endpoints(lab: str, node: str) -> list[tuple[str, str]]:
    return [(get_namespace_name(lab, "bridge"), node), (get_namespace_name(lab, node), "eth0")]


def _derive_mac_address(ip_address: str) -> str:
    """Return the MAC address derived from an IPv4 address. It must stay the same after a reboot, because peers cache it (ARP)."""
    return ":".join(["02", "42", *(f"{int(octet):02x}" for octet in ip_address.split("."))])


def _run_ip(namespace: str, *arguments: str) -> None:
    process.run_command(["ip", "-n", namespace, *arguments])
