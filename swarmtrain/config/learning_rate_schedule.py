"""Learning rate schedules as pure functions of the step, without state to save or restore."""

from __future__ import annotations

import math

from swarmtrain.config import Config
from swarmtrain.config.schema.learning_rate_scheduler import DecayStyle, LearningRateSchedulerConfig


def compute_learning_rate(schedule: LearningRateSchedulerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (the first is 1) in a run of `total_steps` steps.

    The rate is 0 in the first `learning_rate_warmup_delay_steps` steps. It then rises linearly to `learning_rate`, reached on the last
    warmup step, decays to `learning_rate_minimum`, reached on step `learning_rate_decay_iters` (default: `total_steps`), and remains
    constant. With warmup_stable_decay, the rate stays at `learning_rate` after the warmup, and decays only in the last
    `learning_rate_decay_steps` steps (default: 1/5 of `learning_rate_decay_iters`) up to step `learning_rate_decay_iters`.
    """
    highest, lowest = schedule.learning_rate, schedule.learning_rate_minimum
    steps_since_delay = step - schedule.learning_rate_warmup_delay_steps
    if steps_since_delay <= 0:
        return 0.0
    if steps_since_delay < schedule.learning_rate_warmup_steps:
        return highest * steps_since_delay / schedule.learning_rate_warmup_steps
    if schedule.learning_rate_decay_style is DecayStyle.constant:
        return highest
    end = total_steps if schedule.learning_rate_decay_iters is None else schedule.learning_rate_decay_iters
    start = _find_decay_start(schedule, end)
    if step >= end:
        return lowest
    if step <= start:
        return highest
    progress = (step - start) / (end - start)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if schedule.learning_rate_decay_style is DecayStyle.cosine else 1 - progress
    return lowest + (highest - lowest) * remaining


def describe_learning_rate_change(before: Config, after: Config, step: int) -> str:
    """Return a line on the learning rate of `step` with both configs; empty if it is the same."""
    rates = [
        compute_learning_rate(config.learning_rate_scheduler, step, config.trainer.train_iterations or step) for config in (before, after)
    ]
    if rates[0] == rates[1]:
        return ""
    lengths = [config.trainer.train_iterations for config in (before, after)]
    cause = f", since trainer.train_iterations is {lengths[1]} instead of {lengths[0]}" if lengths[0] != lengths[1] else ""
    return f"the learning rate of step {step} is {rates[1]:.3g} instead of {rates[0]:.3g}{cause}"


def _find_decay_start(schedule: LearningRateSchedulerConfig, decay_end_step: int) -> int:
    """Return the last step at the highest learning rate, for a schedule whose decay ends on step `decay_end_step`."""
    warmup_end = schedule.learning_rate_warmup_delay_steps + schedule.learning_rate_warmup_steps
    if schedule.learning_rate_decay_style is not DecayStyle.warmup_stable_decay:
        return warmup_end
    decay_steps = decay_end_step // 5 if schedule.learning_rate_decay_steps is None else schedule.learning_rate_decay_steps
    return max(warmup_end, decay_end_step - decay_steps)
