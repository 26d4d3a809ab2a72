"""When a round begins: a table of who comes when."""

from __future__ import annotations

import pytest

from swarmtrain.entrypoint.gathering import PATIENCE, YOUNG, Gathering


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gathering(clock: Clock) -> Gathering:
    made = Gathering(clock)
    clock.time += YOUNG + 0.1
    return made


def test_who_has_announced_itself_is_waited_for(gathering: Gathering, clock: Clock) -> None:
    for name in ("node0", "node1"):
        gathering.announce(name)
    assert not gathering.come("b-1", "node0", {"node0"})
    clock.time += 5
    assert gathering.come("b-1", "node1", {"node0", "node1"})
    assert gathering.come("b-1", "node0", {"node0", "node1"})


def test_who_was_in_the_last_round_and_lives_is_waited_for_a_while(gathering: Gathering, clock: Clock) -> None:
    assert not gathering.come("b-2", "node0", {"node0", "node1"})
    clock.time += PATIENCE - 1
    assert not gathering.come("b-2", "node0", {"node0", "node1"})
    clock.time += 2
    assert gathering.come("b-2", "node0", {"node0", "node1"})


def test_who_is_dead_or_has_left_is_not_waited_for(gathering: Gathering) -> None:
    gathering.announce("node1")
    gathering.leave("node1")
    assert gathering.come("b-1", "node0", {"node0"})


def test_who_has_come_once_and_is_not_to_come_again_is_not_waited_for(gathering: Gathering) -> None:
    """It sits out, for instance."""
    gathering.announce("node1")
    gathering.come("b-1", "node1", {"node0", "node1"})
    assert gathering.come("b-2", "node0", {"node0"})


def test_an_announcement_does_not_hold_for_ever(gathering: Gathering, clock: Clock) -> None:
    gathering.announce("node1")
    clock.time += PATIENCE + 1
    assert gathering.come("b-1", "node0", {"node0"})


def test_a_round_that_has_begun_takes_who_comes_late(gathering: Gathering) -> None:
    assert gathering.come("b-1", "node0", {"node0"})
    gathering.announce("node1")
    assert gathering.come("b-1", "node1", {"node0", "node1"})


def test_a_young_board_has_not_heard_of_all(clock: Clock) -> None:
    gathering = Gathering(clock)
    assert not gathering.come("b-1", "node0", {"node0"})
    clock.time += YOUNG + 0.1
    assert gathering.come("b-1", "node0", {"node0"})
