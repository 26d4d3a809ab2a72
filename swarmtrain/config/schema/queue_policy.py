"""The policy of a queue: priority classes, limits of owners and idle GPUs. One YAML file for a whole cluster, not part of a config."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from swarmtrain.config.schema.fields.duration import Duration
from swarmtrain.config.schema.fields.notify_channel import ChannelName, ClusterChannelConfig
from swarmtrain.config.schema.runner import CLASS_PATTERN
from swarmtrain.config.schema.section import Section, build_field_error

EVERY_OWNER = "*"
"""Key of the limits of all owners that are not listed."""
_MAX_PRIORITY = 1_000_000
ClassName = Annotated[str, StringConstraints(pattern=CLASS_PATTERN)]
Priority = Annotated[int, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)]


class IdleAction(StrEnum):
    """What happens to a run whose GPUs are idle for too long."""

    report = "report"
    release = "release"


class IdlePolicy(Section):
    """What happens to GPUs that are allocated to a run and not used."""

    after: Duration = Field(description="Time for which all GPUs of a run must be idle, in seconds or as 30m.")
    action: IdleAction = Field(
        IdleAction.report, description="report: queue status shows it. release: the run also saves, stops, and frees its nodes."
    )


class OwnerLimits(Section):
    """Maximum that the running runs of one owner may use together. A run that would exceed it waits."""

    gpus: int | None = Field(None, ge=0, description="GPUs. null: no limit.")
    nodes: int | None = Field(None, ge=0, description="Nodes. null: no limit.")
    runs: int | None = Field(None, ge=0, description="Runs. null: no limit.")


class QueuePolicy(Section):
    """The policy of a queue, as swarmtrain queue policy FILE stores it in the swarm."""

    classes: dict[ClassName, Priority] = Field(
        {"high": 100, "normal": 0, "low": -100}, description="Priority classes: name to priority. Higher priorities go first."
    )
    default_class: str = Field("normal", description="Class of runs that set no runner.priority.")
    limits: dict[str, OwnerLimits] = Field({}, description="Limits by owner; * applies to each owner that is not listed.")

    idle: IdlePolicy | None = Field(None, description="Policy for idle GPUs. null: none.")
    notify: dict[ChannelName, ClusterChannelConfig] = Field({}, description="Channels that receive notifications about each run, by name.")

    @model_validator(mode="after")
    def _check_classes_exist(self) -> QueuePolicy:
        if self.default_class not in self.classes:
            known = f"the classes are {', '.join(self.classes) or 'none'}"
            raise build_field_error("default_class", f"{self.default_class!r} is not in classes; {known}")
        return self

    def get_priority(self, class_name: str | None) -> int:
        """Return the priority of the class `class_name`, or of the default class. Raises KeyError if the class does not exist."""
        return self.classes[class_name or self.default_class]
