"""Hosts and their environment as users of pdsh, MPI and DeepSpeed keep them: ranges, a hostsfile, variables by prefix, a file of variables.

What such files say is written into the config before it travels, so that whoever plans the run anew needs none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.config.explain import explain
from swarmtrain.config.files import Unreadable, read
from swarmtrain.config.runner import OVER_SSH, RunnerConfig, RunnerType
from swarmtrain.errors import ConfigError, Problem

_LARGEST = 1_000_000
_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def settled(config: Config, folder: Path, environ: Mapping[str, str]) -> Config:
    """Return `config` with what its hostsfile, env_file and env_prefixes stand for; relative paths are from `folder`.

    Raises ConfigError.
    """
    runner = config.runner
    update: dict[str, Any] = {}
    if runner.hostsfile is not None:
        update |= {"hosts": _lines(folder / runner.hostsfile, "hostsfile"), "hostsfile": None}
    if runner.runner_type in OVER_SSH:
        env = dict(_variable(line) for line in _lines(folder / runner.env_file, "env_file")) if runner.env_file else {}
        in_container = runner.runner_type is RunnerType.pdsh_docker
        prefixes = tuple(prefix for prefix in runner.env_prefixes if not (in_container and prefix.startswith("PYTHON")))
        passed = {name: value for name, value in environ.items() if prefixes and name.startswith(prefixes)}
        update |= {"env": {**passed, **env, **runner.env}, "env_file": None, "env_prefixes": []}
    if not update:
        return config
    try:
        runner = RunnerConfig.model_validate_json(json.dumps({**runner.model_dump(mode="json"), **update}))
    except ValidationError as error:
        raise ConfigError(tuple(explain(error, RunnerConfig, {}, prefix="runner."))) from None
    return config.model_copy(update={"runner": runner})


def _lines(path: Path, key: str) -> list[str]:
    try:
        text = read(path, _LARGEST).decode()
    except (Unreadable, UnicodeDecodeError) as error:
        raise ConfigError((Problem(f"runner.{key}", f"{path}: {error}"),)) from None
    return [line for each in text.splitlines() if (line := _without_comment(each, key))]


def _without_comment(line: str, key: str) -> str:
    """In a hostsfile a # begins a comment anywhere; in a file of variables, a value may hold one."""
    return line.partition("#")[0].strip() if key == "hostsfile" else "" if line.lstrip().startswith("#") else line.strip()


def _variable(line: str) -> tuple[str, str]:
    match = _VARIABLE.fullmatch(line)
    if match is None:
        raise ConfigError((Problem("runner.env_file", f"{line.partition('=')[0]!r}: a line is NAME=VALUE, or a comment with #"),))
    value = match[2]
    return match[1], value[1:-1] if len(value) > 1 and value[0] == value[-1] in "'\"" else value
