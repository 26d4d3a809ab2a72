"""Checkpoint retention: a function of the existing checkpoints and the config, for any run."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.trainer.checkpoint.retention import CheckpointInfo, RetentionPolicy, select_retained_checkpoints

KEEPS = st.builds(
    RetentionPolicy, newest_count=st.integers(1, 4), best_count=st.integers(0, 3), step_multiple=st.none() | st.integers(1, 6)
)
LOSSES = st.none() | st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf, -math.inf])
CHECKPOINTS = st.builds(CheckpointInfo, generation=st.integers(1, 4), step=st.integers(1, 30), validation_loss=LOSSES)
CHECKPOINT_SETS = st.lists(CHECKPOINTS, max_size=14, unique_by=lambda one: one.step)


def take_newest(checkpoints: set[CheckpointInfo] | list[CheckpointInfo], count: int) -> list[CheckpointInfo]:
    return sorted(checkpoints, key=lambda one: (one.generation, one.step), reverse=True)[:count]


@given(CHECKPOINT_SETS, KEEPS)
def test_the_newest_always_stay_and_nothing_more_without_a_reason(checkpoints: list[CheckpointInfo], policy: RetentionPolicy) -> None:
    stay = select_retained_checkpoints(checkpoints, policy)
    assert set(take_newest(checkpoints, policy.newest_count)) <= stay <= set(checkpoints)
    extra = stay - set(take_newest(checkpoints, policy.newest_count))
    multiples = {one for one in extra if policy.step_multiple and one.step % policy.step_multiple == 0}
    assert len(extra - multiples) <= policy.best_count
    assert all(one.validation_loss is not None and math.isfinite(one.validation_loss) for one in extra - multiples)


@given(CHECKPOINT_SETS, KEEPS)
def test_what_was_removed_is_not_missed(checkpoints: list[CheckpointInfo], policy: RetentionPolicy) -> None:
    """The result is the same when applied again to the retained checkpoints, and for any order in which the disk lists them."""
    stay = select_retained_checkpoints(checkpoints, policy)
    assert select_retained_checkpoints(stay, policy) == stay
    assert select_retained_checkpoints(reversed(checkpoints), policy) == stay


@given(CHECKPOINT_SETS, KEEPS, CHECKPOINTS)
def test_what_was_removed_would_not_have_been_kept_later(
    checkpoints: list[CheckpointInfo], policy: RetentionPolicy, another: CheckpointInfo
) -> None:
    """Removed one after another or all at once: the same checkpoints stay, if the run resumes from the newest."""
    ahead = take_newest(checkpoints, 1)
    later = CheckpointInfo(ahead[0].generation, ahead[0].step + another.step, another.validation_loss) if ahead else another
    assert select_retained_checkpoints([*select_retained_checkpoints(checkpoints, policy), later], policy) == select_retained_checkpoints(
        [*checkpoints, later], policy
    )


@given(CHECKPOINT_SETS, KEEPS)
def test_checkpoints_that_a_later_world_has_overtaken_are_not_kept(checkpoints: list[CheckpointInfo], policy: RetentionPolicy) -> None:
    for one in select_retained_checkpoints(checkpoints, policy) - set(take_newest(checkpoints, policy.newest_count)):
        assert not any(other.generation > one.generation and other.step <= one.step for other in checkpoints)


def test_one_of_each() -> None:
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}
    run = [CheckpointInfo(1, step, losses.get(step)) for step in range(1, 11)]
    assert {one.step for one in select_retained_checkpoints(run, RetentionPolicy(2, 1, 5))} == {4, 5, 9, 10}
    assert {one.step for one in select_retained_checkpoints(run, RetentionPolicy(1))} == {10}
    equal = [CheckpointInfo(1, step, 1.0) for step in (1, 2, 3)]
    assert {one.step for one in select_retained_checkpoints(equal, RetentionPolicy(1, 1))} == {3}, "of equals the newest"
