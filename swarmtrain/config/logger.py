"""`logger`: what is written down, how often, and where to."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from swarmtrain.config.base import Section


class LogLevel(StrEnum):
    """Levels of Python's logging."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"
    critical = "critical"


class LogColor(StrEnum):
    """When lines are in colour."""

    auto = "auto"
    always = "always"
    never = "never"


class LogRanks(Section):
    """Some ranks: those for which all that is said here holds. A list of numbers is read as `ranks`."""

    ranks: tuple[int, ...] | None = Field(None, description="Numbers of ranks. null: any.")
    pipe_parallel_rank: int | None = Field(None, ge=0, description="Stage of the pipeline. null: any.")
    data_parallel_rank: int | None = Field(None, ge=0, description="Replica of the model. null: any.")
    model_parallel_rank: int | None = Field(None, ge=0, description="Place among the ranks that share each layer. null: any.")

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, given: Any) -> Any:
        given = {"ranks": given} if isinstance(given, list | tuple) else given
        numbers = given.get("ranks") if isinstance(given, dict) else None
        return {**given, "ranks": tuple(numbers)} if isinstance(numbers, list) else given

    def include(self, rank: int, place: Mapping[str, int]) -> bool:
        """Return whether `rank` is one of them, of which `place` has the other numbers."""
        wanted = {"pipe": self.pipe_parallel_rank, "data": self.data_parallel_rank, "model": self.model_parallel_rank}
        return (self.ranks is None or rank in self.ranks) and all(number in (None, place[name]) for name, number in wanted.items())


class LoggerConfig(Section):
    """What is written down, how often, and where to."""

    log_level: LogLevel = Field(LogLevel.info, description="Least serious level that is shown.")
    log_color: LogColor = Field(
        LogColor.auto, description="Warnings and errors in colour. auto: on a terminal, unless NO_COLOR is set. always, never."
    )
    log_ranks: LogRanks = Field(
        LogRanks(ranks=(0,)),
        description="Ranks that print all of log_level, as a list of numbers or by where they stand. Others: warnings.",
    )
    log_file_per_rank: bool = Field(False, description="Write what each rank says to a file of its own in log_dir, rank-0003.log.")
    log_interval: int = Field(10, ge=1, description="Steps between two lines of loss, speed and ETA.")
    log_dir: Path | None = Field(None, description="Directory for metrics.jsonl, a line a step. null: save_dir, if there is one.")
    audit_dir: Path | None = Field(
        None, description="Directory where every rank records each step (world token, step, sample ids, loss), synced to disk. null: off."
    )
    use_csv: bool = Field(False, description="Write metrics.csv beside metrics.jsonl, a row a step.")
    use_tensorboard: bool = Field(False, description="Write TensorBoard's event files to log_dir/tensorboard.")
    use_wandb: bool = Field(False, description="Report to Weights & Biases. The key comes from the secret WANDB_API_KEY.")
    wandb_offline: bool = Field(False, description="Write W&B's files to log_dir only, to be synced later.")
    wandb_host: str = Field("https://api.wandb.ai", description="W&B server.")
    wandb_team: str | None = Field(None, description="W&B entity. null: the key's own.")
    wandb_project: str = Field("swarmtrain", description="W&B project.")
    wandb_group: str | None = Field(None, description="W&B group.")
    wandb_tags: tuple[str, ...] = Field((), description="W&B tags.")
