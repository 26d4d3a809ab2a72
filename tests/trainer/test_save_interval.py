"""When checkpoints are due: by steps, by epochs, by the clock, and by their cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from worlds import LocalWorld, list_saved_steps, merge_config

from swarmtrain.config.schema.trainer import TrainerConfig
from swarmtrain.trainer.checkpoint.save_interval import MIN_AUTO_INTERVAL_SECONDS, SaveInterval, compute_auto_interval


def list_due_steps(**config: Any) -> list[int]:
    """Return which of 20 steps of 4 samples are due, if an epoch has 10 samples and every sixth step has a validation loss."""
    save_interval = SaveInterval(TrainerConfig(**config), samples_per_epoch=10, global_batch_size=4)
    return [step for step in range(21) if save_interval.is_due_by_schedule(step, 4 * step, has_validation_loss=step % 6 == 0)]


def test_by_steps_and_epochs() -> None:
    assert list_due_steps(save_interval=7) == list_due_steps(save_interval="7 steps") == [7, 14]
    assert list_due_steps(save_interval="2 epochs") == [5, 10, 15, 20]
    assert list_due_steps(save_interval="1 epoch") == [3, 5, 8, 10, 13, 15, 18, 20]
    assert list_due_steps(save_interval=7, keep_checkpoints_every=5) == [5, 7, 10, 14, 15, 20]
    assert list_due_steps(save_interval=None, keep_best_checkpoints=1, eval_interval=6) == [6, 12, 18]
    assert list_due_steps(save_interval="10 minutes") == list_due_steps(save_interval=None) == list_due_steps() == []


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "often", "0 steps", "10", "10 weeks", "auto ", []])
def test_invalid_intervals(value: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"1 validation error(.|\n)*must be a number of steps, auto, or an interval such as `10 minutes`"
    ):
        TrainerConfig(save_interval=value)


def test_by_the_clock() -> None:
    time = 100.0
    beat = SaveInterval(TrainerConfig(save_interval="2 minutes"), 10, 4, clock=lambda: time)
    time = 219.0
    assert not beat.is_due_by_clock
    time = 220.0
    assert beat.is_due_by_clock
    time = 230.0
    beat.record_stall(10.0)
    time = 349.0
    assert not beat.is_due_by_clock
    time = 350.0
    assert beat.is_due_by_clock
    assert not SaveInterval(TrainerConfig(save_interval=5), 10, 4, clock=lambda: float("inf")).is_due_by_clock


@given(st.floats(0, 600), st.floats(0, 7200))
def test_auto_costs_less_than_one_percent_and_is_as_frequent_as_possible(stood: float, wrote: float) -> None:
    seconds = compute_auto_interval(stood, wrote)
    assert seconds >= MIN_AUTO_INTERVAL_SECONDS
    assert stood / (seconds + stood) < 0.01
    assert wrote <= seconds / 4
    if stood < 10 and wrote < 120:
        assert seconds <= 1320, "22 minutes of work are lost at most"


def test_auto_in_a_run(tmp_path: Path, config: dict[str, Any]) -> None:
    """The first is due after 0.2 s instead of a minute: two ranks save the same step, by rank 0's clock. Its cost postpones the next."""
    short = merge_config(config, trainer={"train_iterations": 30, "keep_checkpoints": 99})
    world = LocalWorld(tmp_path, short, 2, {"PACE": "0.03", "FIRST": "0.2"}, script="slow_disk")
    assert world.wait() == [0, 0], world.read_log()
    first, last = list_saved_steps(tmp_path)
    assert 1 <= first < last == 30
