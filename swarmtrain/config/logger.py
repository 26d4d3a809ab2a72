"""`logger`: what is written down, how often, and where to."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from swarmtrain.config.base import Section


class LogLevel(StrEnum):
    """Levels of Python's logging."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"
    critical = "critical"


class LoggerConfig(Section):
    """What is written down, how often, and where to."""

    log_level: LogLevel = Field(LogLevel.info, description="Least serious level that is shown.")
    log_interval: int = Field(10, ge=1, description="Steps between two lines of loss, speed and ETA.")
    log_dir: Path | None = Field(None, description="Directory for metrics.jsonl, a line a step. null: save_dir, if there is one.")
    audit_dir: Path | None = Field(
        None, description="Directory where every rank records each step (world token, step, sample ids, loss), synced to disk. null: off."
    )
    use_wandb: bool = Field(False, description="Report to Weights & Biases. The key comes from the secret WANDB_API_KEY.")
    wandb_offline: bool = Field(False, description="Write W&B's files to log_dir only, to be synced later.")
    wandb_host: str = Field("https://api.wandb.ai", description="W&B server.")
    wandb_team: str | None = Field(None, description="W&B entity. null: the key's own.")
    wandb_project: str = Field("swarmtrain", description="W&B project.")
    wandb_group: str | None = Field(None, description="W&B group.")
