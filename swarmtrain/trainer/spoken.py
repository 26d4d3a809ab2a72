"""What a rank says: to its console, as much as its place in the world gives it to say, and to a file of its own."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.config.files import reason
from swarmtrain.config.logger import LogColor
from swarmtrain.errors import TrainingError

LOG = logging.getLogger("swarmtrain")
_COLORS = ((logging.ERROR, "31"), (logging.WARNING, "33"))
"""Levels, and the terminal's codes for red and yellow."""


def begin(config: Config, rank: int, size: int) -> None:
    """Let this process's lines go where the config has them. Raises TrainingError if its file cannot be written."""
    logger = config.logger
    level = logger.log_level.upper()
    chosen = logger.log_ranks.include(rank, config.topology.place(rank, size))
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(_Line("" if rank == 0 else f"[rank {rank}] ", colored=_colored(logger.log_color)))
    console.setLevel(level if chosen else max(logging.WARNING, logging.getLevelName(level)))
    for old in LOG.handlers:
        old.close()
    LOG.handlers[:] = [console]
    if logger.log_file_per_rank:
        LOG.addHandler(_file(config, rank))
    LOG.propagate = False
    LOG.setLevel(level)


class _Line(logging.Formatter):
    def __init__(self, prefix: str, *, colored: bool) -> None:
        super().__init__(f"{prefix}%(message)s")
        self._colored = colored

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        color = next((color for level, color in _COLORS if record.levelno >= level), None)
        return f"\033[{color}m{line}\033[0m" if self._colored and color else line


def _colored(when: LogColor) -> bool:
    if when is LogColor.auto:
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return when is LogColor.always


def _file(config: Config, rank: int) -> logging.Handler:
    folder = config.logger.log_dir or config.trainer.save_dir or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"rank-{rank:04}.log")
    except OSError as error:
        hint = "the user that trains needs write access to it"
        raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.log_dir", hint=hint) from None
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return file
