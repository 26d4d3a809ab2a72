"""What a person does to bring one more machine into the swarm, as commands: firewall, daemon.json, token, labels, mounts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.errors import EngineError
from swarmtrain.images.swarm import address
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm.resources import TOOLKIT, daemon, toolkit

_VXLAN = 4789
_ALWAYS_INSECURE = ("127.0.0.0/8", "::1/128")
_NEW = "ITS_ADDRESS"


@dataclass(frozen=True)
class Joining:
    """The swarm as a machine that joins it must know it, and what the config wants of it. Prints itself as a shell script."""

    where: str
    manager: str
    """Address and port of a manager."""
    token: str
    managers: tuple[str, ...]
    """Addresses of those that take changes, and of all nodes."""
    nodes: tuple[str, ...]
    engine: str
    vxlan_port: int
    insecure_registries: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    mounts: tuple[str, ...] = ()
    gpus: str = ""
    """Generic resource that runs reserve, if they do."""
    encrypted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"# A new machine for {self.where}. {_NEW} stands for its address in the network of {', '.join(self.nodes)}"]
        for number, (title, lines) in enumerate(self._steps(), start=1):
            parts.append("\n".join([f"# {number}. {title}", *lines]))
        return "\n\n".join(parts)

    def _steps(self) -> Iterator[tuple[str, list[str]]]:
        yield f"On it: Docker. The others have {self.engine}", ["docker version || echo see https://docs.docker.com/engine/install"]
        yield "On it, if it has a firewall (this is ufw's language)", _allow(self.nodes, 7946, self.vxlan_port, self.encrypted)
        there = _allow((_NEW,), 7946, self.vxlan_port, self.encrypted)
        on_managers = f"ufw allow proto tcp from {_NEW} to any port 2377  # on the managers: {', '.join(self.managers)}"
        yield "On each of the others, if it has one", [*there, on_managers]
        if settings := self._daemon():
            yield "On it: these go into /etc/docker/daemon.json, then systemctl restart docker", settings.splitlines()
        if self.gpus:
            title = f"On it: an entry for each GPU-UUID that nvidia-smi -L shows, and in {TOOLKIT}, as the first line"
            yield title, [toolkit(self.gpus)]
        if self.mounts:
            yield "On it: what the config mounts, with the same content as on the others", [f"ls -d {path}" for path in self.mounts]
        yield (
            "On it: join. The token is a secret; docker swarm join-token --rotate makes a new one",
            [f"docker swarm join --token {self.token} --advertise-addr {_NEW} {self.manager}"],
        )
        labels = [f"docker node update --label-add {key}={value} ITS_HOST_NAME" for key, value in self.labels]
        yield "Here", [*labels, "docker node ls", "swarmtrain doctor"]

    def _daemon(self) -> str:
        settings: dict[str, Any] = {}
        if self.insecure_registries:
            settings["insecure-registries"] = list(self.insecure_registries)
        if self.gpus:
            settings |= daemon(self.gpus)
        return json.dumps(settings, indent=2) if settings else ""


def joining(engine: Engine, config: Config | None, *, as_manager: bool) -> Joining:
    """Ask a manager what a machine must know to join its swarm; `config` adds what its runs want. Raises EngineError."""
    swarm, info = engine.get("/swarm"), engine.get("/info")
    nodes = engine.listing("/nodes")
    managers = [item["ManagerStatus"]["Addr"] for item in nodes if item.get("ManagerStatus", {}).get("Addr")]
    if not managers:
        raise EngineError("no manager of the swarm has an address", place="swarm", hint="swarmtrain doctor")
    runner = config.runner if config else None
    return Joining(
        where=f"the swarm at {engine.endpoint}",
        manager=managers[0],
        token=swarm["JoinTokens"]["Manager" if as_manager else "Worker"],
        managers=tuple(each.rpartition(":")[0] for each in managers),
        nodes=tuple(sorted(address(item) for item in nodes)),
        engine=str(info["ServerVersion"]),
        vxlan_port=swarm.get("DataPathPort") or _VXLAN,
        insecure_registries=tuple(_insecure(info)),
        labels=tuple(sorted(runner.swarm.labels.items())) if runner else (),
        mounts=tuple(source for source, _ in runner.docker_config.docker_mounts if source.startswith("/")) if runner else (),
        gpus=runner.swarm.generic_resource if runner and runner.swarm.gpu is GpuMode.reserve else "",
        encrypted=bool(runner and runner.swarm.encrypted),
    )


def _insecure(info: dict[str, Any]) -> list[str]:
    registries = info.get("RegistryConfig") or {}
    ranges = [each for each in registries.get("InsecureRegistryCIDRs") or [] if each not in _ALWAYS_INSECURE]
    names = [name for name, each in (registries.get("IndexConfigs") or {}).items() if not each.get("Secure", True)]
    return sorted({*ranges, *names})


def _allow(peers: tuple[str, ...], gossip: int, data: int, encrypted: bool) -> list[str]:
    rules = [f"ufw allow proto tcp from $peer to any port {gossip}", f"ufw allow proto udp from $peer to any port {gossip},{data}"]
    if encrypted:
        rules.append("ufw allow proto esp from $peer")
    if len(peers) == 1:
        return [rule.replace("$peer", peers[0]) for rule in rules]
    return [f"for peer in {' '.join(peers)}; do", *(f"  {rule}" for rule in rules), "done"]
