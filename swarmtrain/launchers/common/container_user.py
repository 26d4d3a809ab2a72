"""Choose the user that ranks run as if the config names no user: the owner of the folder save_dir, if it exists on this machine.

So a run can write to a save_dir that its user has created. The user is stored in the deployed config: while the
run is up, every new plan keeps this user, regardless of who makes the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.render.mounts import list_save_dir_host_folders

_ROOT_UID = 0
# User id of `nobody`, which a network file system shows for an owner that it cannot map: no run may use this user.
_NOBODY_UID = 65534


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
