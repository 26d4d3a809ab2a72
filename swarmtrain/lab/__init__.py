"""A real Docker Swarm on one Linux machine: real engines in namespaces, a registry, a shared disk, and faults to order."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmtrain.lab.lab import Lab, NodeStatus
    from swarmtrain.lab.registry import REGISTRY

__all__ = ["DEFAULT_NAME", "REGISTRY", "Lab", "NodeStatus"]

DEFAULT_NAME = "lab"
_HOMES = {"Lab": "lab", "NodeStatus": "lab", "REGISTRY": "registry"}


def __getattr__(name: str) -> Any:
    """Import what is asked for on first use: `--help` wants the lab's default name, and nothing else of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
