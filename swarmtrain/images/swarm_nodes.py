"""Swarm queries that the registry and the image distribution need: the manager's engine, and the nodes' names and addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit


class ManagerEngine(Protocol):
    """The methods of a manager's engine that the registry and the distribution need. They raise EngineError."""

    address: str

    def get(self, api_path: str, params: Mapping[str, str] | None = None) -> Any: ...

    def list_objects(self, api_path: str, **filters: str) -> list[dict[str, Any]]: ...

    def post(self, api_path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None, *, image: str | None = None) -> Any: ...

    def delete(self, api_path: str) -> bool: ...

    def inspect_distribution(self, image: str) -> Any: ...


def get_engine_node_id(engine: ManagerEngine) -> str:
    """Return the swarm node id of the engine itself; "" if the engine is not in a swarm."""
    return str(engine.get("/info")["Swarm"]["NodeID"])


def get_host_name(node: Mapping[str, Any]) -> str:
    """Return the host name of `node`, a node object of the Docker API."""
    return str(node["Description"]["Hostname"])


def get_node_address(node: Mapping[str, Any]) -> str:
    """Return the address at which the other nodes reach `node`, a node object of the Docker API."""
    status_address = str(node["Status"].get("Addr", ""))
    manager_address = str(node.get("ManagerStatus", {}).get("Addr", "")).rpartition(":")[0]
    return manager_address if manager_address and status_address in ("", "0.0.0.0", "127.0.0.1") else status_address  # noqa: S104  # addresses that a manager may report for itself


def list_other_engines(engine: ManagerEngine, **filters: str) -> dict[str, str]:
    """Return the engines of all other nodes that match `filters` (name → ssh:// address).

    The SSH user is the one in this engine's own address.
    """
    own_node_id = get_engine_node_id(engine)
    nodes = sorted((node for node in engine.list_objects("/nodes", **filters) if node["ID"] != own_node_id), key=get_host_name)
    return {get_host_name(node): build_engine_address(engine, node) for node in nodes}


def build_engine_address(engine: ManagerEngine, node: Mapping[str, Any]) -> str:
    """Return the ssh:// address of the engine of `node`, a node object of the Docker API, with the SSH user of the manager's engine."""
    user = urlsplit(engine.address).username if engine.address.startswith("ssh://") else None
    return f"ssh://{user}@{get_node_address(node)}" if user else f"ssh://{get_node_address(node)}"
