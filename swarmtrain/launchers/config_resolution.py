"""Resolve the values of a config that depend on this machine: its files, environment variables, and the user that ranks run as.

If the config names no user, ranks run as the owner of the folder save_dir, if it exists on this machine: so a run can write to a
save_dir that its user has created. While the run is up, every new plan keeps the user of the deployed config.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.cargo import Cargo, read_cargo
from swarmtrain.config import Config
from swarmtrain.config.external_inputs import resolve_external_inputs
from swarmtrain.planning.inventory import Inventory
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement
from swarmtrain.planning.plan import Plan, add_notes, build_plan
from swarmtrain.render.mounts import list_save_dir_host_folders

_ROOT_UID = 0
# User id of `nobody`, which a network file system shows for an owner that it cannot map: no run may use this user.
_NOBODY_UID = 65534
_CREDENTIAL_NAME_PATTERN = re.compile(r"(?:.*_)?(?:KEY|TOKEN)|.*PASSWORD", re.IGNORECASE)


@dataclass(frozen=True)
class ResolvedConfig:
    """A config without references to this machine's files or environment variables, its shipped files (`cargo`), and notes for the user."""

    config: Config
    cargo: Cargo
    notes: tuple[str, ...]

    def build_plan(self, inventory: Inventory, run: str, placement: Placement = FRESH_PLACEMENT, *, min_nodes: int | None = None) -> Plan:
        """Return the plan for `run` on the machines of `inventory`. Raises PlanError if fewer than `min_nodes` of them are available."""
        plan = build_plan(self.config, inventory, self.cargo, run=run, placement=placement, min_nodes=min_nodes)
        return add_notes(plan, *self.notes)


def resolve_config(config: Config, working_folder: Path, load_running_config: Callable[[], Config | None]) -> ResolvedConfig:
    """Return `config` with the values that depend on this machine resolved: files, environment variables, the owner of save_dir.

    Paths are relative to `working_folder`. Raises SwarmtrainError if a file cannot be read. `load_running_config` returns the deployed
    config of the run, or None.
    """
    config = resolve_external_inputs(config, working_folder, os.environ)  # the hostsfile, the env file, and environment variables
    cargo = read_cargo(config, working_folder)  # the script, its files and secrets
    config, user_note = resolve_container_user(config, load_running_config)  # the owner of save_dir
    return ResolvedConfig(config, cargo, (user_note, _describe_code(config, cargo), _describe_visible_credentials(config)))


def _describe_code(config: Config, cargo: Cargo) -> str:
    """Return a note on the code files if runner.code names folders or patterns; else an empty string."""
    if len(cargo.code) <= len(config.runner.code) + 1:
        return ""
    return f"code: {len(cargo.code)} files, {sum(len(file.content) for file in cargo.code) / 1e3:,.0f} kB"


def _describe_visible_credentials(config: Config) -> str:
    """Return a note on the variables in runner.env whose names are those of credentials; an empty string if there are none."""
    names = [name for name, value in config.runner.env.items() if value and _CREDENTIAL_NAME_PATTERN.fullmatch(name)]
    if not names:
        return ""
    places = (
        "docker inspect, in the config and in checkpoints"
        if config.runner.capabilities.runs_in_containers
        else "the config and checkpoints"
    )
    return f"runner.env: {', '.join(names)} can be read in {places}; put credentials into files, and list these in runner.secrets"


def resolve_container_user(config: Config, load_running_config: Callable[[], Config | None]) -> tuple[Config, str]:
    """Return `config` with the user that the ranks will run as, and a line that explains the choice.

    The line is empty if no choice was needed. `load_running_config` returns the config with which the run of this name was deployed; it is
    called only if a choice is needed.
    """
    folders = list_save_dir_host_folders(config)
    if not config.runner.capabilities.runs_as_folder_owner or config.runner.docker_config.user or not folders:
        return config, ""
    running_config = load_running_config()
    if running_config is not None and list_save_dir_host_folders(running_config) == folders:
        user = running_config.runner.docker_config.user
        return _set_container_user(config, user), f"user: {user}, as in the run that is already deployed" if user else ""
    for folder in folders:
        with contextlib.suppress(OSError):
            status = Path(folder).stat()
            if status.st_uid in (_ROOT_UID, _NOBODY_UID):
                return (
                    config,
                    f"user: the image's default, because {folder} on this machine is owned by "
                    f"{'root' if status.st_uid == _ROOT_UID else 'nobody'}",
                )
            user = f"{status.st_uid}:{status.st_gid}"
            return _set_container_user(config, user), f"user: {user}, the owner of {folder} on this machine"
    return config, ""


def _set_container_user(config: Config, user: str | None) -> Config:
    docker = config.runner.docker_config.model_copy(update={"user": user})
    return config.model_copy(update={"runner": config.runner.model_copy(update={"docker_config": docker})})
