"""When checkpoints are due: by steps, by epochs, by the clock, and by what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from worlds import World, changed, steps_saved

from swarmtrain.config.trainer import TrainerConfig
from swarmtrain.trainer.checkpoint.rhythm import FIRST, Rhythm, auto


def steps_due(**config: Any) -> list[int]:
    """Return which of 20 steps of 4 samples are due, where an epoch has 10 samples and each sixth step is measured."""
    beat = Rhythm(TrainerConfig(**config), samples=10, batch=4)
    return [step for step in range(21) if beat.due(step, 4 * step, measured=step % 6 == 0)]


def test_by_steps_and_epochs() -> None:
    assert steps_due(save_interval=7) == steps_due(save_interval="7 steps") == [7, 14]
    assert steps_due(save_interval="2 epochs") == [5, 10, 15, 20]
    assert steps_due(save_interval="1 epoch") == [3, 5, 8, 10, 13, 15, 18, 20]
    assert steps_due(save_interval=7, keep_checkpoints_every=5) == [5, 7, 10, 14, 15, 20]
    assert steps_due(save_interval=None, keep_best_checkpoints=1, eval_interval=6) == [6, 12, 18]
    assert steps_due(save_interval="10 minutes") == steps_due(save_interval=None) == steps_due() == []


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "often", "0 steps", "10", "10 weeks", "auto ", []])
def test_what_is_no_interval(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"1 validation error(.|\n)*must be a number of steps, auto, or as `10 minutes`"):
        TrainerConfig(save_interval=value)


def test_by_the_clock() -> None:
    time = 100.0
    beat = Rhythm(TrainerConfig(save_interval="2 minutes"), 10, 4, now=lambda: time)
    time = 219.0
    assert not beat.wished
    time = 220.0
    assert beat.wished
    time = 230.0
    beat.stood(10.0)
    time = 349.0
    assert not beat.wished
    time = 350.0
    assert beat.wished
    assert not Rhythm(TrainerConfig(save_interval=5), 10, 4, now=lambda: float("inf")).wished


@given(st.floats(0, 600), st.floats(0, 7200))
def test_auto_costs_less_than_a_hundredth_and_is_no_rarer_than_it_must(stood: float, wrote: float) -> None:
    seconds = auto(stood, wrote)
    assert seconds >= FIRST
    assert stood / (seconds + stood) < 0.01
    assert wrote <= seconds / 4
    if stood < 10 and wrote < 120:
        assert seconds <= 1320, "22 minutes of work are lost at most"


def test_auto_in_a_run(tmp_path: Path, config: dict[str, Any]) -> None:
    """The first due after 0.2 s instead of a minute: two ranks save one step by rank 0's clock. Its cost says that the next has time."""
    short = changed(config, trainer={"train_iterations": 30, "keep_checkpoints": 99})
    world = World(tmp_path, short, 2, {"PACE": "0.03", "FIRST": "0.2"}, script="slow_disk")
    assert world.wait() == [0, 0], world.log()
    first, last = steps_saved(tmp_path)
    assert 1 <= first < last == 30
