"""`logger`: log output and metrics sinks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from swarmtrain.config.schema.section import Section


class LogLevel(StrEnum):
    """Log levels of Python's logging."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"
    critical = "critical"


class LogColor(StrEnum):
    """When log lines are colored."""

    auto = "auto"
    always = "always"
    never = "never"


class LogRanks(Section):
    """Selection of the ranks that log: a rank must meet all conditions. A plain list of numbers sets only the field `ranks`."""

    ranks: tuple[int, ...] | None = Field(None, description="Global rank numbers. null: any.")
    pipe_parallel_rank: int | None = Field(None, ge=0, description="Pipeline-parallel rank. null: any.")
    data_parallel_rank: int | None = Field(None, ge=0, description="Data-parallel rank (replica). null: any.")
    model_parallel_rank: int | None = Field(None, ge=0, description="Tensor-parallel rank. null: any.")

    @model_validator(mode="before")
    @classmethod
    def _parse_rank_list(cls, value: Any) -> Any:
        value = {"ranks": value} if isinstance(value, list | tuple) else value
        numbers = value.get("ranks") if isinstance(value, dict) else None
        return {**value, "ranks": tuple(numbers)} if isinstance(numbers, list) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(core_schema), {"type": "array", "items": {"type": "integer"}}]}

    def has_rank(self, rank: int, coordinates: Mapping[str, int]) -> bool:
        """Return whether `rank` is selected; `coordinates` has its pipe, data and model coordinates."""
        expected = {"pipe": self.pipe_parallel_rank, "data": self.data_parallel_rank, "model": self.model_parallel_rank}
        return (self.ranks is None or rank in self.ranks) and all(number in (None, coordinates[name]) for name, number in expected.items())


def _parse_sinks(value: Any) -> Any:
    """Convert a list of sink names to a mapping of each name to empty options."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return {name: {} for name in value}
    return value


SinkOptions = Annotated[
    dict[str, dict[str, Any]], BeforeValidator(_parse_sinks, json_schema_input_type=dict[str, dict[str, Any]] | tuple[str, ...])
]


class LoggerConfig(Section):
    """Log output and metrics sinks."""

    log_level: LogLevel = Field(LogLevel.info, description="Minimum log level.")
    log_color: LogColor = Field(
        LogColor.auto, description="Color warnings and errors. auto: on a terminal, unless NO_COLOR is set. always, never."
    )
    log_ranks: LogRanks = Field(
        LogRanks(ranks=(0,)),
        description="Ranks that print at log_level, as a list of numbers or by coordinates. All others print warnings and errors only.",
    )
    log_file_per_rank: bool = Field(False, description="Also write each rank's output to a file in log_dir, rank-0003.log.")
    log_interval: int = Field(10, ge=1, description="Steps between log lines with loss, speed and ETA.")
    log_dir: Path | None = Field(None, description="Directory for metrics.jsonl, one line per step. null: save_dir, if set.")
    audit_dir: Path | None = Field(
        None,
        description="Directory in which every rank records each step (world generation, step, sample ids, loss), synced "
        "to disk. null: off.",
    )
    use_csv: bool = Field(False, description="Also write metrics.csv, one row per step.")
    use_tensorboard: bool = Field(False, description="Write TensorBoard event files to log_dir/tensorboard.")
    use_wandb: bool = Field(False, description="Log to Weights & Biases. The API key comes from the secret WANDB_API_KEY.")
    wandb_offline: bool = Field(False, description="Write W&B files to log_dir only, for a later wandb sync.")
    wandb_host: str = Field("https://api.wandb.ai", description="W&B server URL.")
    wandb_team: str | None = Field(None, description="W&B entity. null: the default entity of the API key.")
    wandb_project: str = Field("swarmtrain", description="W&B project.")
    wandb_group: str | None = Field(None, description="W&B group. null: none.")
    wandb_tags: tuple[str, ...] = Field((), description="W&B tags.")
    sinks: SinkOptions = Field(
        {}, description="Further metrics sinks, also of other packages: a list of names, or a mapping of each name to its options."
    )
