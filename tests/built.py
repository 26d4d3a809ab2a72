"""The image is built and pushed once in a test run: what one lab has is given to the others, as if it had been done there before.

A shelf is a folder with an engine's images, its build cache, and what the registry has; while nothing is on it, it is not there.
SWARMTRAIN_TEST_SHELF names the folder of one that the suites of a run share; the first to build the image puts it there.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from swarmtrain.lab import Lab, registry
from swarmtrain.lab.state import base_directory
from swarmtrain.launchers.engine import Engine

_REGISTRY = "registry"
_NEVER_WRITTEN_AGAIN = Path("docker", "registry", "v2", "blobs")
"""What a registry has under the hash of its content. Beside it are the names, and these it writes in place."""


def shared() -> Path | None:
    """Return the shelf that the suites of this run share, or None if there is none."""
    folder = os.environ.get("SWARMTRAIN_TEST_SHELF")
    return Path(folder) / "built" if folder else None


def keep(lab: Lab, node: str, shelf: Path | None) -> None:
    """Put the node's images on the `shelf`, its build cache and the registry with them. Nothing may be built there meanwhile.

    Nothing happens if there is something on it.
    """
    if shelf is None or shelf.exists():
        return
    begun = Path(tempfile.mkdtemp(dir=shelf.parent))
    for name in _folders(lab, node):
        _link(_data(lab, node) / name, begun / name)
    _copy_registry(registry.store(base_directory()), begun / _REGISTRY)
    begun.rename(shelf)


def give_registry(shelf: Path | None) -> None:
    """Give the registry of labs what is on the `shelf`; nothing happens if that is empty. Nothing of it may be there."""
    if shelf is not None and shelf.exists():
        _copy_registry(shelf / _REGISTRY, registry.store(base_directory()))


def give(lab: Lab, nodes: Sequence[str], shelf: Path | None) -> None:
    """Give nodes that have no images those on the `shelf`; nothing happens if that is empty."""
    if shelf is None or not shelf.exists():
        return
    names = {node: _folders(lab, node) for node in nodes}
    for node in nodes:
        lab.kill(node, say=print)
        for name in names[node]:
            subprocess.run(["rm", "-rf", str(_data(lab, node) / name)], check=True)
            _link(shelf / name, _data(lab, node) / name)
    for node in nodes:
        lab.start(node, say=print)


def _copy_registry(source: Path, target: Path) -> None:
    _link(source / _NEVER_WRITTEN_AGAIN, target / _NEVER_WRITTEN_AGAIN)
    names = _NEVER_WRITTEN_AGAIN.with_name("repositories")
    subprocess.run(["cp", "-a", str(source / names), str(target / names)], check=True)


def _link(source: Path, target: Path) -> None:
    """Make a copy of links, of what is not mounted there: engine and registry write these files anew and never change them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["cp", "-alx", str(source), str(target)], stderr=subprocess.DEVNULL, check=False).returncode:  # another disk
        subprocess.run(["rm", "-rf", str(target)], check=True)
        subprocess.run(["cp", "-ax", str(source), str(target)], check=True)


def _data(lab: Lab, node: str) -> Path:
    return Path(lab.docker_host(node).removeprefix("unix://")).parent / "data"


def _folders(lab: Lab, node: str) -> list[str]:
    """Return the folders of the engine's data that hold images."""
    return ["image", str(Engine(lab.docker_host(node)).get("/info")["Driver"])]
