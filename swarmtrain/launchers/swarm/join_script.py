"""Generate the shell script that joins a machine to the swarm: firewall, daemon.json, join token, labels, mounts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.errors import EngineError
from swarmtrain.images.swarm_nodes import get_node_address
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.cluster_state import read_inventory
from swarmtrain.launchers.swarm.machines.generic_resources import TOOLKIT_CONFIG_PATH, build_daemon_json, format_toolkit_setting
from swarmtrain.planning.gpu_resolution import resolve_gpu_mode
from swarmtrain.planning.node_selection import list_usable_machines

_DEFAULT_VXLAN_PORT = 4789
_DEFAULT_INSECURE_RANGES = ("127.0.0.0/8", "::1/128")
_NEW_NODE_ADDRESS = "ITS_ADDRESS"


@dataclass(frozen=True)
class JoinScript:
    """Data for joining a machine to the swarm: the swarm's addresses, and the requirements of the config. str() returns a shell script."""

    location: str
    manager: str
    """Address and port of the manager to join."""
    token: str
    managers: tuple[str, ...]
    """Addresses of all managers; `nodes` has the addresses of all nodes."""
    nodes: tuple[str, ...]
    engine: str
    vxlan_port: int
    insecure_registries: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    mounts: tuple[str, ...] = ()
    generic_resource: str = ""
    """Kind of generic resource that runs reserve; empty if they reserve none."""
    encrypted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the data as a JSON-compatible dict, for `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        paragraphs = [
            f"# Add a new machine to {self.location}. {_NEW_NODE_ADDRESS} is a placeholder for its address in the network of "
            f"{', '.join(self.nodes)}"
        ]
        for number, (title, lines) in enumerate(self._list_steps(), start=1):
            paragraphs.append("\n".join([f"# {number}. {title}", *lines]))
        return "\n\n".join(paragraphs)

    def _list_steps(self) -> Iterator[tuple[str, list[str]]]:
        yield (
            f"On the new machine: install Docker. The other nodes have {self.engine}",
            ["docker version || echo see https://docs.docker.com/engine/install"],
        )
        yield (
            "On the new machine, if it has a firewall (ufw syntax)",
            _format_firewall_rules(self.nodes, 7946, self.vxlan_port, self.encrypted),
        )
        rules = _format_firewall_rules((_NEW_NODE_ADDRESS,), 7946, self.vxlan_port, self.encrypted)
        on_managers = f"ufw allow proto tcp from {_NEW_NODE_ADDRESS} to any port 2377  # on the managers: {', '.join(self.managers)}"
        yield "On each of the other nodes, if it has a firewall", [*rules, on_managers]
        if daemon_json := self._format_daemon_json():
            yield (
                "On the new machine: add these settings to /etc/docker/daemon.json, then run systemctl restart docker",
                daemon_json.splitlines(),
            )
        if self.generic_resource:
            title = (
                "On the new machine: replace GPU-UUID with one entry per UUID listed by nvidia-smi -L, and add to "
                f"{TOOLKIT_CONFIG_PATH}, as its first line"
            )
            yield title, [format_toolkit_setting(self.generic_resource)]
        if self.mounts:
            yield (
                "On the new machine: the paths that the config mounts must exist, with the same content as on the other nodes",
                [f"ls -d {path}" for path in self.mounts],
            )
        yield (
            "On the new machine: join the swarm. The token is a secret; docker swarm join-token --rotate creates a new one",
            [f"docker swarm join --token {self.token} --advertise-addr {_NEW_NODE_ADDRESS} {self.manager}"],
        )
        labels = [f"docker node update --label-add {key}={value} ITS_HOST_NAME" for key, value in self.labels]
        yield "On this machine", [*labels, "docker node ls", "swarmtrain doctor"]

    def _format_daemon_json(self) -> str:
        settings: dict[str, Any] = {}
        if self.insecure_registries:
            settings["insecure-registries"] = list(self.insecure_registries)
        if self.generic_resource:
            settings |= build_daemon_json(self.generic_resource)
        return json.dumps(settings, indent=2) if settings else ""


def build_join_script(engine: DockerEngine, config: Config | None, *, as_manager: bool) -> JoinScript:
    """Return the script that joins a machine to the engine's swarm; `config` adds the requirements of its runs. Raises EngineError."""
    swarm, info = engine.get("/swarm"), engine.get("/info")
    nodes = engine.list_objects("/nodes")
    managers = [item["ManagerStatus"]["Addr"] for item in nodes if item.get("ManagerStatus", {}).get("Addr")]
    if not managers:
        raise EngineError("no manager of the swarm has an address", place="swarm", hint="swarmtrain doctor")
    runner = config.runner if config else None
    mode = (
        resolve_gpu_mode(config, list_usable_machines(config, read_inventory(engine)), config.runner.node_range[1])[0] if config else None
    )
    return JoinScript(
        location=f"the swarm at {engine.endpoint}",
        manager=managers[0],
        token=swarm["JoinTokens"]["Manager" if as_manager else "Worker"],
        managers=tuple(address_with_port.rpartition(":")[0] for address_with_port in managers),
        nodes=tuple(sorted(get_node_address(item) for item in nodes)),
        engine=str(info["ServerVersion"]),
        vxlan_port=swarm.get("DataPathPort") or _DEFAULT_VXLAN_PORT,
        insecure_registries=tuple(_list_insecure_registries(info)),
        labels=tuple(sorted(runner.swarm.labels.items())) if runner else (),
        mounts=tuple(source for source, _ in runner.docker_config.docker_mounts if source.startswith("/")) if runner else (),
        generic_resource=runner.swarm.generic_resource if runner and mode is GpuMode.reserve else "",
        encrypted=bool(runner and runner.swarm.encrypted),
    )


def _list_insecure_registries(engine_info: dict[str, Any]) -> list[str]:
    registries = engine_info.get("RegistryConfig") or {}
    ranges = [entry for entry in registries.get("InsecureRegistryCIDRs") or [] if entry not in _DEFAULT_INSECURE_RANGES]
    names = [name for name, entry in (registries.get("IndexConfigs") or {}).items() if not entry.get("Secure", True)]
    return sorted({*ranges, *names})


def _format_firewall_rules(peers: tuple[str, ...], gossip_port: int, vxlan_port: int, encrypted: bool) -> list[str]:
    rules = [
        f"ufw allow proto tcp from $peer to any port {gossip_port}",
        f"ufw allow proto udp from $peer to any port {gossip_port},{vxlan_port}",
    ]
    if encrypted:
        rules.append("ufw allow proto esp from $peer")
    if len(peers) == 1:
        return [rule.replace("$peer", peers[0]) for rule in rules]
    return [f"for peer in {' '.join(peers)}; do", *(f"  {rule}" for rule in rules), "done"]
