"""A real Docker Swarm on one Linux machine: real engines in namespaces, a registry, a shared disk, and faults to order."""

from __future__ import annotations

from swarmtrain.lab.lab import DEFAULT_NAME, Lab, NodeStatus
from swarmtrain.lab.registry import REGISTRY

__all__ = ["DEFAULT_NAME", "REGISTRY", "Lab", "NodeStatus"]
