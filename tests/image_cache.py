"""The image is built and pushed once per test run: the result of one lab is copied into the others.

A cache is a folder with an engine's images, its build cache, and the registry's content. An empty cache does not exist as a folder.
SWARMTRAIN_TEST_IMAGE_CACHE names the folder of the cache that the suites of a test run share; the first to build the image fills it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from swarmtrain.lab import Lab, engines, registry
from swarmtrain.lab.state import get_labs_folder

_REGISTRY = "registry"
_IMMUTABLE_BLOBS = Path("docker", "registry", "v2", "blobs")
"""The registry's content-addressed blobs. Next to them are the tags, which the registry modifies in place."""


def find_shared_cache() -> Path | None:
    """Return the cache that the suites of this test run share, or None."""
    folder = os.environ.get("SWARMTRAIN_TEST_IMAGE_CACHE")
    return Path(folder) / "built" if folder else None


def save_images(lab: Lab, node: str, cache: Path | None) -> None:
    """Save the node's images, its build cache and the registry to `cache`. Nothing may be built there meanwhile.

    Do nothing if the cache exists.
    """
    if cache is None or cache.exists():
        return
    staging = Path(tempfile.mkdtemp(dir=cache.parent))
    for name in engines.list_image_folders(lab.directory, node):
        engines.copy_with_hard_links(engines.get_data_folder(lab.directory, node) / name, staging / name)
    _copy_registry(registry.get_image_store_path(get_labs_folder()), staging / _REGISTRY)
    staging.rename(cache)


def restore_registry(cache: Path | None) -> None:
    """Copy the registry's content from `cache` to the labs' registry, which must not have it yet. Do nothing without a cache."""
    if cache is not None and cache.exists():
        _copy_registry(cache / _REGISTRY, registry.get_image_store_path(get_labs_folder()))


def restore_images(lab: Lab, nodes: Sequence[str], cache: Path | None) -> None:
    """Copy the images from `cache` to nodes without images. Do nothing if the cache does not exist."""
    if cache is None or not cache.exists():
        return
    names = engines.list_image_folders(lab.directory, nodes[0])
    for node in nodes:
        lab.power_off_node(node, report_progress=print)
        for name in names:
            engines.copy_with_hard_links(cache / name, engines.get_data_folder(lab.directory, node) / name)
    for node in nodes:
        lab.power_on_node(node, report_progress=print)


def _copy_registry(source: Path, target: Path) -> None:
    engines.copy_with_hard_links(source / _IMMUTABLE_BLOBS, target / _IMMUTABLE_BLOBS)
    names = _IMMUTABLE_BLOBS.with_name("repositories")
    subprocess.run(["cp", "-a", str(source / names), str(target / names)], check=True)
