"""The Docker image that the nodes run: built from pre-downloaded wheels, pushed to a registry, and pinned to its digest there.

An engine is passed in as docker-py's low-level client. Its errors, and those of the HTTP library below it, are OSErrors, so nothing in
this package needs to import docker.
"""

from __future__ import annotations

from swarmtrain.images.builder import build_image
from swarmtrain.images.code_layer import add_code_layer, add_file_layer
from swarmtrain.images.image_distribution import distribute_image
from swarmtrain.images.pinning import PinnedImage, pin_image
from swarmtrain.images.transfer_progress import push_image

__all__ = ["PinnedImage", "add_code_layer", "add_file_layer", "build_image", "distribute_image", "pin_image", "push_image"]
