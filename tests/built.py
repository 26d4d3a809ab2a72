"""The image is built and pushed once for all pages: what one lab has is given to the others, as if it had been done there before."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swarmtrain.lab import Lab, registry
from swarmtrain.lab.state import base_directory
from swarmtrain.launchers.engine import Engine

_REGISTRY = "registry"


def keep(lab: Lab, node: str, shelf: Path) -> None:
    """Put the node's images on the `shelf`, its build cache and the registry with them. Nothing may be built there meanwhile."""
    data = _data(lab, node)
    for name in _folders(lab, node):
        _copy(data / name, shelf / name)
    _copy(registry.store(base_directory()), shelf / _REGISTRY)


def give_registry(shelf: Path) -> None:
    """Give the registry of labs that are not up yet what is on the `shelf`; nothing happens if that is empty."""
    if (shelf / _REGISTRY).exists():
        _copy(shelf / _REGISTRY, registry.store(base_directory()))


def give(lab: Lab, node: str, shelf: Path) -> None:
    """Give a node that has no images those on the `shelf`; nothing happens if that is empty."""
    if not (shelf / _REGISTRY).exists():
        return
    data, names = _data(lab, node), _folders(lab, node)
    lab.kill(node, say=print)
    for name in names:
        subprocess.run(["rm", "-rf", str(data / name)], check=True)
        _copy(shelf / name, data / name)
    lab.start(node, say=print)


def _copy(source: Path, target: Path) -> None:
    """Make a copy of links: engine and registry write files anew and never change them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-al", str(source), str(target)], check=True)


def _data(lab: Lab, node: str) -> Path:
    return Path(lab.docker_host(node).removeprefix("unix://")).parent / "data"


def _folders(lab: Lab, node: str) -> list[str]:
    """Return the folders of the engine's data that hold images."""
    return ["image", str(Engine(lab.docker_host(node)).get("/info")["Driver"])]
