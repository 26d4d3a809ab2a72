"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from swarmtrain.config.learning_rate_scheduler import DecayStyle, LearningRateSchedulerConfig


def learning_rate(schedule: LearningRateSchedulerConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step number `step` (the first is 1) of a run of `steps`.

    0 during the delay; then a straight line up to `learning_rate`, reached on the last step of the warm-up; then down to
    `learning_rate_minimum`, reached on step `learning_rate_decay_iters` (default: `steps`), and that from there on.
    """
    highest, lowest = schedule.learning_rate, schedule.learning_rate_minimum
    since = step - schedule.learning_rate_warmup_delay_steps
    if since <= 0:
        return 0.0
    if since < schedule.learning_rate_warmup_steps:
        return highest * since / schedule.learning_rate_warmup_steps
    if schedule.learning_rate_decay_style is DecayStyle.constant:
        return highest
    start = schedule.learning_rate_warmup_delay_steps + schedule.learning_rate_warmup_steps
    end = steps if schedule.learning_rate_decay_iters is None else schedule.learning_rate_decay_iters
    if step >= end:
        return lowest
    done = (step - start) / (end - start)
    left = 1 - done if schedule.learning_rate_decay_style is DecayStyle.linear else (1 + math.cos(math.pi * done)) / 2
    return lowest + (highest - lowest) * left
