"""Who the ranks are where the config does not say: whoever owns the folder that they save to, if it is a folder here.

A folder that somebody has made as himself can then be written by his run. What is found is written into the config that
travels with the run, so that it is looked up once: as long as the run is up, whoever plans it anew keeps what it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.config.runner import RunnerType
from swarmtrain.render.mounts import save_sources

_CONTAINERS = (RunnerType.swarm, RunnerType.docker)
_ROOT = 0
# What a system shows for an owner whom it cannot name, as network file systems do: nobody is to become that one.
_UNKNOWN = 65534


def settle(config: Config, running: Callable[[], Config | None]) -> tuple[Config, str]:
    """Return `config` with the user that the ranks will be, and a line that says why; the line is empty where nothing was settled.

    `running` returns the config that the run of this name is up with, and is asked only where there is something to settle.
    """
    folders = save_sources(config)
    if config.runner.runner_type not in _CONTAINERS or config.runner.docker_config.user or not folders:
        return config, ""
    up = running()
    if up is not None and save_sources(up) == folders:
        user = up.runner.docker_config.user
        return _with(config, user), f"user: {user}, as the run that is up has it" if user else ""
    for folder in folders:
        with contextlib.suppress(OSError):
            facts = Path(folder).stat()
            if facts.st_uid in (_ROOT, _UNKNOWN):
                return config, f"user: the image's, for {folder} here is {'root' if facts.st_uid == _ROOT else 'nobody'}'s"
            user = f"{facts.st_uid}:{facts.st_gid}"
            return _with(config, user), f"user: {user}, the owner of {folder} here"
    return config, ""


def _with(config: Config, user: str | None) -> Config:
    docker = config.runner.docker_config.model_copy(update={"user": user})
    return config.model_copy(update={"runner": config.runner.model_copy(update={"docker_config": docker})})
