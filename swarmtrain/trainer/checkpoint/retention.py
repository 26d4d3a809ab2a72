"""Which checkpoints stay when a newer one stands: a function of what there is and of what the config says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmtrain.config.trainer import Best, TrainerConfig


@dataclass(frozen=True)
class Standing:
    """A checkpoint that stands, as far as it matters here."""

    token: int
    step: int
    held_out_loss: float | None = None


@dataclass(frozen=True)
class Keep:
    """How many to keep. One that any of the three wants is kept."""

    newest: int
    """So many, by (token, step); at least one."""
    best: int = 0
    """So many of those whose held-out loss is lowest, or whatever was measured."""
    every: int | None = None
    """All of a step that is a multiple of this."""
    highest: bool = False
    """Of what was measured more is better."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Keep:
        highest = config.best_checkpoints_are is Best.highest
        return cls(config.keep_checkpoints, config.keep_best_checkpoints, config.keep_checkpoints_every, highest)


def kept(standing: Iterable[Standing], keep: Keep) -> set[Standing]:
    """Return which of `standing` are kept.

    What a newer world has come past by going back, an older world's equal or higher step, is no part of the run any more:
    it is kept only while it is among the newest, to fall back to.
    """
    newest_first = sorted(standing, key=lambda one: (one.token, one.step), reverse=True)
    own: list[Standing] = []
    for one in newest_first:
        if not own or one.step < own[-1].step:
            own.append(one)
    sign = -1.0 if keep.highest else 1.0
    ranked = [(sign * one.held_out_loss, -one.step, one) for one in own if one.held_out_loss is not None]
    measured = [one for *_, one in sorted(ranked, key=lambda each: each[:2])]
    multiples = [one for one in own if keep.every and one.step % keep.every == 0]
    return {*newest_first[: keep.newest], *measured[: keep.best], *multiples}
