"""Retention of checkpoints: select those to keep when a newer checkpoint is committed, from their metadata and the config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from swarmtrain.config.schema.trainer import BestCheckpointMode, TrainerConfig


@dataclass(frozen=True)
class CheckpointInfo:
    """Metadata of a committed checkpoint that determine whether it is kept."""

    generation: int
    step: int
    validation_loss: float | None = None


@dataclass(frozen=True)
class RetentionPolicy:
    """Rules that select the checkpoints to keep: a checkpoint that any of the three rules selects is kept."""

    newest_count: int
    """Number of newest checkpoints to keep, by (generation, step); at least one."""
    best_count: int = 0
    """Number of checkpoints to keep with the best validation loss or custom metric. NaN/Inf is never the best."""
    step_multiple: int | None = None
    """Keep all checkpoints whose step is a multiple of this number; None: no such rule."""
    higher_is_better: bool = False
    """True if a higher metric is better (custom metrics such as accuracy), False if a lower one is better (validation loss)."""

    @classmethod
    def from_config(cls, config: TrainerConfig) -> RetentionPolicy:
        higher_is_better = config.best_checkpoint_mode is BestCheckpointMode.max
        return cls(config.keep_checkpoints, config.keep_best_checkpoints, config.keep_checkpoints_every, higher_is_better)


def select_retained_checkpoints(checkpoints: Iterable[CheckpointInfo], policy: RetentionPolicy) -> set[CheckpointInfo]:
    """Return the checkpoints that `policy` keeps.

    A checkpoint of an older generation is superseded if a newer generation has a checkpoint with the same or a lower step: the newer world
    has resumed from an earlier step. A superseded checkpoint is kept only as a fallback, while it is among the newest checkpoints.
    """
    newest_first = sorted(checkpoints, key=lambda one: (one.generation, one.step), reverse=True)
    active: list[CheckpointInfo] = []
    for one in newest_first:
        if not active or one.step < active[-1].step:
            active.append(one)
    sign = -1.0 if policy.higher_is_better else 1.0
    evaluated = [(one.validation_loss, one) for one in active if one.validation_loss is not None and isfinite(one.validation_loss)]
    ranked = [(sign * loss, -one.step, one) for loss, one in evaluated]
    best_first = [one for *_, one in sorted(ranked, key=lambda each: each[:2])]
    multiples = [one for one in active if policy.step_multiple and one.step % policy.step_multiple == 0]
    return {*newest_first[: policy.newest_count], *best_first[: policy.best_count], *multiples}
