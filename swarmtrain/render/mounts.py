"""What a node's container has mounted, as the stack document says it, and where in that save_dir lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.runner import DockerConfig
from swarmtrain.plan import CodeFile

WORKSPACE = PurePosixPath("/workspace")
"""Where the job runs in the container, and where relative paths begin."""


def mounts(docker: DockerConfig) -> list[dict[str, Any]]:
    """Return the mounts of a node: /dev/shm, and what the config says."""
    found: list[dict[str, Any]] = [{"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": docker.shm_size}}]
    for source, target in docker.docker_mounts:
        bind = source.startswith("/")
        name = source if bind else _volume_name(docker, source)
        found.append({"type": "bind" if bind else "volume", "source": untemplated(name), "target": untemplated(target)})
    return found


def volumes(docker: DockerConfig) -> Mapping[str, dict[str, Any]]:
    """Return the volumes among them by name, each with its options."""
    names = sorted({source for source, _ in docker.docker_mounts if not source.startswith("/")})
    return {_volume_name(docker, name): _volume(docker, name) for name in names}


def save_mount(config: Config) -> tuple[str, str] | None:
    """Return source and target of the mount that save_dir lies in, None if it lies in none."""
    path = _save_path(config)
    holding = [pair for pair in config.runner.docker_config.docker_mounts if path is not None and path.is_relative_to(pair[1])]
    return max(holding, key=lambda pair: len(pair[1]), default=None)


def save_sources(config: Config) -> tuple[PurePosixPath, ...]:
    """Return the folder on a node that save_dir is in the container, then those above it up to the mount's source.

    Empty if save_dir is in no folder of the node's.
    """
    path, mount = _save_path(config), save_mount(config)
    if path is None or mount is None or not mount[0].startswith("/"):
        return ()
    source = PurePosixPath(mount[0])
    folder = source / path.relative_to(mount[1])
    return tuple(each for each in (folder, *folder.parents) if each.is_relative_to(source))


def untemplated(value: str) -> str:
    """Keep Swarm from reading `{{` in a user's value as a Go template."""
    return value.replace("{{", '{{"{{"}}')


def templated(value: str) -> str:
    """Undo `untemplated`, for an engine that reads no templates."""
    return value.replace('{{"{{"}}', "{{")


def _save_path(config: Config) -> PurePosixPath | None:
    save_dir = config.trainer.save_dir
    return None if save_dir is None else WORKSPACE / PurePosixPath(save_dir)


def _volume(docker: DockerConfig, name: str) -> dict[str, Any]:
    return {"driver": "local", "driver_opts": docker.volumes[name]} if name in docker.volumes else {}


def _volume_name(docker: DockerConfig, name: str) -> str:
    """Return the volume's name, with its options' digest: a volume that a node has once keeps those it was made with."""
    if name not in docker.volumes:
        return name
    return f"{name}-{CodeFile.of(name, json.dumps(docker.volumes[name], sort_keys=True).encode()).digest}"
