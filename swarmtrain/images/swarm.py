"""What registry and spread need of a swarm: its manager's engine, and its nodes' names and addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit


class Swarm(Protocol):
    """The methods of a manager's engine that the images need; they raise EngineError."""

    address: str

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Any: ...

    def listing(self, path: str, **filters: str) -> list[dict[str, Any]]: ...

    def post(self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None, *, image: str | None = None) -> Any: ...

    def delete(self, path: str) -> bool: ...

    def distribution(self, image: str) -> Any: ...


def own_id(engine: Swarm) -> str:
    """Return the id of the node that the engine itself is; "" if it is in no swarm."""
    return str(engine.get("/info")["Swarm"]["NodeID"])


def host(node: Mapping[str, Any]) -> str:
    """Return the host name of a node."""
    return str(node["Description"]["Hostname"])


def address(node: Mapping[str, Any]) -> str:
    """Return the address by which the other nodes know a node."""
    seen = str(node["Status"].get("Addr", ""))
    manager = str(node.get("ManagerStatus", {}).get("Addr", "")).rpartition(":")[0]
    return manager if manager and seen in ("", "0.0.0.0", "127.0.0.1") else seen  # noqa: S104  # what a manager may call itself


def others(engine: Swarm) -> dict[str, str]:
    """Return the engines of all nodes but the engine's own, name to ssh:// address, with the user who reached this one."""
    own, user = own_id(engine), urlsplit(engine.address).username if engine.address.startswith("ssh://") else None
    nodes = sorted((node for node in engine.listing("/nodes") if node["ID"] != own), key=host)
    return {host(node): f"ssh://{user}@{address(node)}" if user else f"ssh://{address(node)}" for node in nodes}
