"""Load the config that a command names; where it is a file of another tool, name the command that imports it."""

from collections.abc import Sequence
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.config.loader import STDIN_PATH, load_config
from swarmtrain.errors import ConfigError, Problem, SwarmtrainError


def load_config_file(config_file: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in `config_file`, or on standard input for `-`, changed by `overrides`.

    Raises SwarmtrainError if the file cannot be read or is a file of another tool, ConfigError for all other problems.
    """
    try:
        return load_config(config_file, overrides)
    except ConfigError as error:
        if config_file != STDIN_PATH:
            _raise_if_foreign(config_file, error)
        raise


def _raise_if_foreign(config_file: Path, error: ConfigError) -> None:
    from swarmtrain.importers import SourceFormat, recognize_foreign_config

    source_format = recognize_foreign_config(config_file, [problem.path for problem in error.problems])
    import_command = f"swarmtrain import {config_file}"
    if source_format is SourceFormat.scaling:  # most of its keys are also keys of a swarmtrain config, so the other problems are of use
        problem = Problem("", "has keys of a config of Scaling", hint=f"{import_command} converts it")
        raise ConfigError((*error.problems, problem), source=str(config_file)) from None
    if source_format is not None:
        article = "an" if source_format in (SourceFormat.accelerate, SourceFormat.sbatch) else "a"
        message = f"is {article} {source_format} file, not a swarmtrain config"
        raise SwarmtrainError(message, place=str(config_file), hint=import_command) from None
