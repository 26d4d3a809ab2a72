"""Logging of one rank: to its console, filtered by level and by rank coordinates, and optionally to a log file per rank."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.config.schema.logger import LogColor
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import TrainingError

LOG = logging.getLogger("swarmtrain")
_LEVEL_COLORS = ((logging.ERROR, "31"), (logging.WARNING, "33"))
"""Minimum log level and ANSI color code: red for errors, yellow for warnings."""


def configure_logging(config: Config, rank: int, world_size: int) -> None:
    """Configure the logging of this process from `config.logger`. Raises TrainingError if the log file cannot be written."""
    logger = config.logger
    level = logger.log_level.upper()
    is_selected = logger.log_ranks.has_rank(rank, config.topology.compute_rank_coordinates(rank, world_size))
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(_ColorFormatter("" if rank == 0 else f"[rank {rank}] ", use_color=_should_use_color(logger.log_color)))
    console.setLevel(level if is_selected else max(logging.WARNING, logging.getLevelName(level)))
    for handler in LOG.handlers:
        handler.close()
    LOG.handlers[:] = [console]
    if logger.log_file_per_rank:
        LOG.addHandler(_create_file_handler(config, rank))
    LOG.propagate = False
    LOG.setLevel(level)


class _ColorFormatter(logging.Formatter):
    def __init__(self, prefix: str, *, use_color: bool) -> None:
        super().__init__(f"{prefix}%(message)s")
        self._use_color = use_color

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        color = next((color for level, color in _LEVEL_COLORS if record.levelno >= level), None)
        return f"\033[{color}m{line}\033[0m" if self._use_color and color else line


def _should_use_color(mode: LogColor) -> bool:
    if mode is LogColor.auto:
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return mode is LogColor.always


def _create_file_handler(config: Config, rank: int) -> logging.Handler:
    folder = config.logger.log_dir or config.trainer.save_dir or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"rank-{rank:04}.log")
    except OSError as error:
        hint = "give the training user write access to it"
        raise TrainingError(f"{error.filename}: {describe_os_error(error)}", place="config logger.log_dir", hint=hint) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler
