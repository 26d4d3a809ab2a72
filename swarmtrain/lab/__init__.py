"""A real Docker Swarm on one Linux machine: real engines in namespaces, a registry, a shared disk, and fault injection."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmtrain.lab.lab import Lab, NodeStatus
    from swarmtrain.lab.registry import REGISTRY_ADDRESS

__all__ = ["DEFAULT_NAME", "REGISTRY_ADDRESS", "Lab", "NodeStatus"]

DEFAULT_NAME = "lab"
_EXPORT_MODULES = {"Lab": "lab", "NodeStatus": "lab", "REGISTRY_ADDRESS": "registry"}


def __getattr__(name: str) -> Any:
    """Import the export `name` on first use and return it: `--help` needs only the lab's default name."""
    if name not in _EXPORT_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORT_MODULES[name]}"), name)
