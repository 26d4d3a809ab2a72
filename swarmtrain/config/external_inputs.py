"""Resolve a config's external inputs: hostsfile, env file, and environment variables by prefix, as in pdsh, MPI and DeepSpeed.

Their contents are written into the config before it is shipped, so that later plans of the run do not need the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.user_files import UnreadableFileError, read_file_with_limit
from swarmtrain.config.validation_errors import convert_validation_error
from swarmtrain.errors import ConfigError, Problem

_MAX_FILE_BYTES = 1_000_000
_VARIABLE_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def resolve_external_inputs(config: Config, base_folder: Path, environ: Mapping[str, str]) -> Config:
    """Return `config` with its hostsfile, env_file and env_prefixes resolved; relative paths are relative to `base_folder`.

    Raises ConfigError if a file cannot be read or is invalid.
    """
    runner = config.runner
    update: dict[str, Any] = {}
    if runner.hostsfile is not None:
        update |= {"hosts": _read_uncommented_lines(base_folder / runner.hostsfile, "hostsfile"), "hostsfile": None}
    if runner.capabilities.passes_environment:
        env = (
            dict(_parse_env_variable(line) for line in _read_uncommented_lines(base_folder / runner.env_file, "env_file"))
            if runner.env_file
            else {}
        )
        in_container = runner.capabilities.runs_in_containers
        prefixes = tuple(prefix for prefix in runner.env_prefixes if not (in_container and prefix.startswith("PYTHON")))
        inherited = {name: value for name, value in environ.items() if prefixes and name.startswith(prefixes)}
        update |= {"env": {**inherited, **env, **runner.env}, "env_file": None, "env_prefixes": []}
    if not update:
        return config
    try:
        runner = RunnerConfig.model_validate_json(json.dumps({**runner.model_dump(mode="json"), **update}))
    except ValidationError as error:
        raise ConfigError(tuple(convert_validation_error(error, RunnerConfig, {}, prefix="runner."))) from None
    return config.model_copy(update={"runner": runner})


def _read_uncommented_lines(path: Path, config_key: str) -> list[str]:
    try:
        text = read_file_with_limit(path, _MAX_FILE_BYTES).decode()
    except (UnreadableFileError, UnicodeDecodeError) as error:
        raise ConfigError((Problem(f"runner.{config_key}", f"{path}: {error}"),)) from None
    return [line for raw_line in text.splitlines() if (line := _strip_comment(raw_line, config_key))]


def _strip_comment(line: str, config_key: str) -> str:
    """Return `line` without its comment. In a hostsfile, # begins a comment anywhere; in an env file only at the start of a line."""
    return line.partition("#")[0].strip() if config_key == "hostsfile" else "" if line.lstrip().startswith("#") else line.strip()


def _parse_env_variable(line: str) -> tuple[str, str]:
    match = _VARIABLE_LINE.fullmatch(line)
    if match is None:
        raise ConfigError(
            (Problem("runner.env_file", f"{line.partition('=')[0]!r}: expected NAME=VALUE, or a comment that starts with #"),)
        )
    value = match[2]
    return match[1], value[1:-1] if len(value) > 1 and value[0] == value[-1] in "'\"" else value
