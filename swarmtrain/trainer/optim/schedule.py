"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from swarmtrain.config.learning_rate_scheduler import DecayStyle, LearningRateSchedulerConfig


def learning_rate(schedule: LearningRateSchedulerConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step number `step` (the first is 1) of a run of `steps`.

    0 during the delay; then a straight line up to `learning_rate`, reached on the last step of the warm-up; then down to
    `learning_rate_minimum`, reached on step `learning_rate_decay_iters` (default: `steps`), and that from there on. With
    warmup_stable_decay it stays up until the last `learning_rate_decay_steps` (default: a fifth) of these.
    """
    highest, lowest = schedule.learning_rate, schedule.learning_rate_minimum
    since = step - schedule.learning_rate_warmup_delay_steps
    if since <= 0:
        return 0.0
    if since < schedule.learning_rate_warmup_steps:
        return highest * since / schedule.learning_rate_warmup_steps
    if schedule.learning_rate_decay_style is DecayStyle.constant:
        return highest
    end = steps if schedule.learning_rate_decay_iters is None else schedule.learning_rate_decay_iters
    start = _decay_start(schedule, end)
    if step >= end:
        return lowest
    if step <= start:
        return highest
    done = (step - start) / (end - start)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule.learning_rate_decay_style is DecayStyle.cosine else 1 - done
    return lowest + (highest - lowest) * left


def _decay_start(schedule: LearningRateSchedulerConfig, end: int) -> int:
    """Return the last step of the highest rate, if the decay ends on step `end`."""
    warm = schedule.learning_rate_warmup_delay_steps + schedule.learning_rate_warmup_steps
    if schedule.learning_rate_decay_style is not DecayStyle.warmup_stable_decay:
        return warm
    decay = end // 5 if schedule.learning_rate_decay_steps is None else schedule.learning_rate_decay_steps
    return max(warm, end - decay)
