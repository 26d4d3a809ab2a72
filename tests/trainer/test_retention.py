"""Which checkpoints stay: a function of what there is and of the config, for any run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.trainer.checkpoint.retention import Keep, Standing, kept

KEEPS = st.builds(Keep, newest=st.integers(1, 4), best=st.integers(0, 3), every=st.none() | st.integers(1, 6))
LOSSES = st.none() | st.sampled_from([1.0, 2.0, 3.0])
STANDING = st.builds(Standing, token=st.integers(1, 4), step=st.integers(1, 30), held_out_loss=LOSSES)
SETS = st.lists(STANDING, max_size=14, unique_by=lambda one: one.step)


def newest(standing: set[Standing] | list[Standing], count: int) -> list[Standing]:
    return sorted(standing, key=lambda one: (one.token, one.step), reverse=True)[:count]


@given(SETS, KEEPS)
def test_the_newest_always_stay_and_nothing_more_without_a_reason(standing: list[Standing], keep: Keep) -> None:
    stay = kept(standing, keep)
    assert set(newest(standing, keep.newest)) <= stay <= set(standing)
    extra = stay - set(newest(standing, keep.newest))
    multiples = {one for one in extra if keep.every and one.step % keep.every == 0}
    assert len(extra - multiples) <= keep.best
    assert all(one.held_out_loss is not None for one in extra - multiples)


@given(SETS, KEEPS)
def test_what_was_removed_is_not_missed(standing: list[Standing], keep: Keep) -> None:
    """Asked again of what has stayed, and whatever the order in which the disk lists it, it is the same."""
    stay = kept(standing, keep)
    assert kept(stay, keep) == stay
    assert kept(reversed(standing), keep) == stay


@given(SETS, KEEPS, STANDING)
def test_what_was_removed_would_not_have_been_kept_later(standing: list[Standing], keep: Keep, another: Standing) -> None:
    """One after another removed or all at once: the same stay, where the run goes on from the newest."""
    ahead = newest(standing, 1)
    later = Standing(ahead[0].token, ahead[0].step + another.step, another.held_out_loss) if ahead else another
    assert kept([*kept(standing, keep), later], keep) == kept([*standing, later], keep)


@given(SETS, KEEPS)
def test_what_a_world_has_come_past_is_kept_for_no_merit(standing: list[Standing], keep: Keep) -> None:
    for one in kept(standing, keep) - set(newest(standing, keep.newest)):
        assert not any(other.token > one.token and other.step <= one.step for other in standing)


def test_one_of_each() -> None:
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}
    run = [Standing(1, step, losses.get(step)) for step in range(1, 11)]
    assert {one.step for one in kept(run, Keep(2, 1, 5))} == {4, 5, 9, 10}
    assert {one.step for one in kept(run, Keep(1))} == {10}
    equal = [Standing(1, step, 1.0) for step in (1, 2, 3)]
    assert {one.step for one in kept(equal, Keep(1, 1))} == {3}, "of equals the newest"
