"""The image that the nodes run: built from wheels that lie ready, pushed, and pinned to what the registry holds.

An engine is handed in as docker-py's low-level client. Its errors, and those of the HTTP library below it, are OSErrors,
so that nothing here needs to import docker.
"""

from __future__ import annotations

from swarmtrain.images.add import add
from swarmtrain.images.build import build
from swarmtrain.images.pin import Pinned, pin
from swarmtrain.images.push import push
from swarmtrain.images.spread import spread

__all__ = ["Pinned", "add", "build", "pin", "push", "spread"]
