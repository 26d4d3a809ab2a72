"""The lab's network: a bridge in a namespace of its own, and one veth pair from it to each machine.

The bridge's end of a pair is called after its node and lives in the fabric's namespace; the other end is the machine's eth0.
On the host's own network nothing is added: in there, an engine's FORWARD rules would cut the machines off from each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import LabError, ProcessError
from swarmtrain.lab.state import Description

REGISTRY_HOST = "registry.lab"
"""What the machines call the bridge's address."""
_BRIDGE = "bridge"
_CONFINED = "inside a container this takes docker run --privileged"
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def namespace(lab: str, part: str) -> str:
    """Return the name of the network namespace of a node, or of the `fabric`."""
    return f"st-{lab}-{part}"


def path(lab: str, part: str) -> Path:
    """Return the file that is that namespace, on this machine."""
    return Path("/run/netns") / namespace(lab, part)


def enter(lab: str, part: str) -> list[str]:
    """Return the prefix that runs a command in that network namespace.

    Not `ip netns exec`: that mounts /sys anew, and dockerd then finds no devices cgroup.
    """
    return ["nsenter", f"--net={path(lab, part)}"]


def check_kernel() -> None:
    """Raise LabError unless this kernel lets us make a network namespace and every kind of link that a lab needs."""
    name = f"st-probe-{os.getpid()}"
    try:
        process.run(["ip", "netns", "add", name])
    except ProcessError as error:
        raise LabError(f"no network namespace can be made: {error.output.strip()}", place="lab", hint=_CONFINED) from None
    try:
        _probe(name, "veth", "peer", "name", "probe1")
        _probe(name, "vxlan", "id", "1", "dstport", "4789")
        _probe(name, "bridge")
    finally:
        process.run(["ip", "netns", "delete", name])


def make(description: Description) -> None:
    """Make the fabric's namespace and its bridge. Raises LabError if its name is taken."""
    fabric = namespace(description.name, "fabric")
    if fabric in namespaces():
        raise LabError(
            f"namespace {fabric} is there already, but not from a lab in this directory",
            place="lab",
            hint="take another --name, or set SWARMTRAIN_LAB_DIR to the directory of that lab",
        )
    process.run(["ip", "netns", "add", fabric])
    _ip(fabric, "link", "set", "lo", "up")
    # Of its own a bridge takes the lowest address of its ports, another one when a node is killed, and the nodes would not reach the
    # registry until they have forgotten the old one.
    _ip(fabric, "link", "add", _BRIDGE, "address", _hardware_address(description.bridge_address), "type", "bridge")
    _ip(fabric, "addr", "add", f"{description.bridge_address}/24", "dev", _BRIDGE)
    _ip(fabric, "link", "set", _BRIDGE, "up")


def connect(description: Description, node: str) -> None:
    """Make the node's namespace and the wire from it to the bridge. It gets no default route: what is not in the lab fails at once."""
    fabric, own = namespace(description.name, "fabric"), namespace(description.name, node)
    process.run(["ip", "netns", "add", own])
    _ip(fabric, "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", own)
    _ip(fabric, "link", "set", node, "master", _BRIDGE, "up")
    _ip(own, "link", "set", "lo", "up")
    _ip(own, "link", "set", "eth0", "address", _hardware_address(description.address(node)))
    _ip(own, "addr", "add", f"{description.address(node)}/24", "dev", "eth0")
    _ip(own, "link", "set", "eth0", "up")


def remove(lab: str, part: str) -> None:
    """Remove a namespace and with it the wires that end there; nothing happens if it is not there."""
    if namespace(lab, part) in namespaces():
        process.run(["ip", "netns", "delete", namespace(lab, part)])


def remove_wire(lab: str, node: str) -> None:
    """Remove the node's wire at the bridge; nothing happens if it is not there."""
    own = namespace(lab, node)
    with contextlib.suppress(ProcessError):  # one whose making was interrupted has a name and nothing behind it
        if own in namespaces() and "eth0" in process.run(["ip", "-n", own, "link", "show", "type", "veth"]):
            _ip(own, "link", "delete", "eth0")


def namespaces() -> set[str]:
    """Return the names of all network namespaces of this machine."""
    directory = Path("/run/netns")
    return {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()


def cut(lab: str, node: str) -> None:
    """Take the node's wire down at the bridge: the machine lives on, its network is gone."""
    _ip(namespace(lab, "fabric"), "link", "set", node, "down")


def heal(lab: str, node: str) -> None:
    """Bring the node's wire up, at full speed."""
    for part, device in _ends(lab, node):
        process.run(["tc", "-n", part, "qdisc", "replace", "dev", device, "root", "noqueue"])
    _ip(namespace(lab, "fabric"), "link", "set", node, "up")


def slow(lab: str, node: str, rate: str) -> None:
    """Hold the node's wire to `rate` (`100mbit`, `1gbit`), in both directions. Raises LabError for what is no rate."""
    burst = max(128 * 1024, int(bits_per_second(rate) / 8 * 0.004))
    for part, device in _ends(lab, node):
        shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
        process.run(["tc", "-n", part, "qdisc", "replace", "dev", device, "root", *shape])


def bits_per_second(rate: str) -> float:
    """Return the rate in bits a second. Raises LabError unless it is a positive number and kbit, mbit or gbit."""
    match = _RATE.fullmatch(rate)
    if not match or float(match[1]) <= 0:
        raise LabError(f"{rate!r} is no rate", place="lab slow --rate", hint="a number and kbit, mbit or gbit: 100mbit, 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def wires(lab: str) -> dict[str, str]:
    """Return each connected node's wire: `up`, `cut`, or the rate that it is held to, as tc prints it."""
    fabric = namespace(lab, "fabric")
    links = json.loads(process.run(["ip", "-n", fabric, "-j", "link", "show", "type", "veth"]) or "[]")
    shaped = {
        queue["dev"]: f"{queue['options']['rate'] * 8 / 1e6:g}mbit"
        for queue in json.loads(process.run(["tc", "-n", fabric, "-j", "qdisc", "show"]) or "[]")
        if queue["kind"] == "tbf"
    }
    return {link["ifname"]: shaped.get(link["ifname"], "up") if "UP" in link["flags"] else "cut" for link in links if "ifname" in link}


def _ends(lab: str, node: str) -> list[tuple[str, str]]:
    return [(namespace(lab, "fabric"), node), (namespace(lab, node), "eth0")]


def _hardware_address(address: str) -> str:
    """Return the MAC address that goes with an IPv4 address: one that stays over a boot, or the peers look for the old one for seconds."""
    return ":".join(["02", "42", *(f"{int(part):02x}" for part in address.split("."))])


def _probe(namespace: str, kind: str, *settings: str) -> None:
    try:
        _ip(namespace, "link", "add", "probe0", "type", kind, *settings)
    except ProcessError as error:
        raise LabError(f"this kernel makes no {kind} links: {error.output.strip()}", place="lab", hint=f"modprobe {kind}") from None
    _ip(namespace, "link", "delete", "probe0")


def _ip(namespace: str, *arguments: str) -> None:
    process.run(["ip", "-n", namespace, *arguments])
