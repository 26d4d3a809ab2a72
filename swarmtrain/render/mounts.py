"""Mounts of a node's container, as in the stack document, and the mount that contains save_dir."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from swarmtrain.cargo import RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import DockerConfig

WORKSPACE = PurePosixPath("/workspace")
"""Working folder of the job in the container; relative paths are relative to it."""


def build_mounts(docker_config: DockerConfig) -> list[dict[str, Any]]:
    """Return the mounts of a node: /dev/shm, and the mounts in the config."""
    mount_entries: list[dict[str, Any]] = [{"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": docker_config.shm_size}}]
    for source, target in docker_config.docker_mounts:
        is_bind = source.startswith("/")
        name = source if is_bind else _build_volume_name(docker_config, source)
        mount_entries.append(
            {"type": "bind" if is_bind else "volume", "source": escape_go_template(name), "target": escape_go_template(target)}
        )
    return mount_entries


def build_volumes(docker_config: DockerConfig) -> Mapping[str, dict[str, Any]]:
    """Return the named volumes that the config mounts, each with its options."""
    names = sorted({source for source, _ in docker_config.docker_mounts if not source.startswith("/")})
    return {_build_volume_name(docker_config, name): _build_volume_definition(docker_config, name) for name in names}


def find_save_dir_mount(config: Config) -> tuple[str, str] | None:
    """Return the source and target of the mount that contains save_dir; None if save_dir is not in a mount."""
    path = _resolve_save_dir_path(config)
    containing_mounts = [pair for pair in config.runner.docker_config.docker_mounts if path is not None and path.is_relative_to(pair[1])]
    return max(containing_mounts, key=lambda pair: len(pair[1]), default=None)


def list_save_dir_host_folders(config: Config) -> tuple[PurePosixPath, ...]:
    """Return the folder on the node that corresponds to save_dir, then its parents up to the source of its mount.

    Empty if save_dir is not in a folder that is mounted from the node.
    """
    path, mount = _resolve_save_dir_path(config), find_save_dir_mount(config)
    if path is None or mount is None or not mount[0].startswith("/"):
        return ()
    source = PurePosixPath(mount[0])
    folder = source / path.relative_to(mount[1])
    return tuple(candidate for candidate in (folder, *folder.parents) if candidate.is_relative_to(source))


def escape_go_template(value: str) -> str:
    """Return `value` with `{{` escaped, since Swarm expands Go templates in values."""
    return value.replace("{{", '{{"{{"}}')


def unescape_go_template(value: str) -> str:
    """Return `value` with the escapes of `escape_go_template` removed, for an engine that does not expand templates."""
    return value.replace('{{"{{"}}', "{{")


def _resolve_save_dir_path(config: Config) -> PurePosixPath | None:
    save_dir = config.trainer.save_dir
    return None if save_dir is None else WORKSPACE / PurePosixPath(save_dir)


def _build_volume_definition(docker_config: DockerConfig, name: str) -> dict[str, Any]:
    return {"driver": "local", "driver_opts": docker_config.volumes[name]} if name in docker_config.volumes else {}


def _build_volume_name(docker_config: DockerConfig, name: str) -> str:
    """Return the volume's name with a digest of its options: an existing volume keeps the options with which it was created."""
    if name not in docker_config.volumes:
        return name
    return f"{name}-{RunFile.from_content(name, json.dumps(docker_config.volumes[name], sort_keys=True).encode()).digest}"
