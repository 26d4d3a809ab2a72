"""Who saves what of a world that has broken: rules on values, and the board's clock in the test's hand."""

from __future__ import annotations

import pytest

from swarmtrain.entrypoint.rescues import PATIENCE, SETTLED, SILENT, Rescues, chosen
from swarmtrain.wire import Event, Rescue, Stand


def at(step: int, *, ready: bool = False, part: int = 0, parts: int = 1, disk: int = 0, disks: int = 1) -> Stand:
    return Stand(step, ready, part, parts, 4, disk, disks)


@pytest.mark.parametrize(
    ("stands", "late", "step", "writers"),
    [
        ({2: at(7)}, False, 7, (2,)),
        ({2: at(7, ready=True)}, False, 0, ()),  # another may have made step 8
        ({2: at(7, ready=True)}, True, 7, (2,)),
        ({1: at(7, ready=True), 2: at(8)}, False, 8, (2,)),
        ({1: at(6, ready=True), 3: at(7), 2: at(7)}, False, 7, (2,)),
        ({0: at(7, part=0, parts=2)}, True, 0, ()),
        ({0: at(7, part=0, parts=2), 3: at(7, part=1, parts=2)}, False, 7, (0, 3)),
        # Told of the end of step 8 unevenly: who is ready makes it too.
        ({0: at(8, part=0, parts=2), 3: at(7, ready=True, part=1, parts=2)}, True, 8, (0, 3)),
        # Who has not even the gradients of step 8 cannot; and who has made it has no longer step 7.
        ({0: at(8, part=0, parts=2), 3: at(7, part=1, parts=2)}, True, 0, ()),
        ({0: at(8, part=0, parts=2), 2: at(7, part=0, parts=2), 3: at(7, part=1, parts=2)}, True, 7, (2, 3)),
        ({0: at(0)}, True, 0, ()),  # nothing has been made yet
        # On disks of their own all nodes save that hold the whole; halves on two disks are no whole.
        ({1: at(7, disk=0), 2: at(7, disk=1), 3: at(7, disk=1)}, True, 7, (1, 2)),
        ({1: at(6, disk=0), 2: at(7, disk=1)}, True, 7, (2,)),
        ({0: at(7, part=0, parts=2), 3: at(7, part=1, parts=2, disk=1)}, True, 0, ()),
        ({0: at(7, part=0, parts=2), 1: at(7, part=1, parts=2), 3: at(7, part=1, parts=2, disk=1)}, True, 7, (0, 1)),
    ],
)
def test_the_newest_whole_step_is_saved_once(stands: dict[int, Stand], *, late: bool, step: int, writers: tuple[int, ...]) -> None:
    assert chosen(stands, late=late) == (step, writers)


def test_a_writer_that_falls_silent_is_replaced_until_nobody_is_left() -> None:
    clock = [100.0]
    board = Rescues(lambda: clock[0])
    assert not board.pending
    assert board.stand("world", 1, at(7)) == Rescue(7, (1,), 1)
    assert board.stand("world", 2, at(7)).writers == (1,)
    assert board.pending
    clock[0] += SILENT + 0.1
    assert board.stand("world", 2, at(7)) == Rescue(7, (2,), 2)
    board.rescued("world", 1, 1)  # the first one was merely slow: its word no longer counts
    assert board.pending
    board.rescued("world", 2, 2)
    assert not board.pending
    assert board.stand("world", 1, at(7)).over


def test_nodes_with_disks_of_their_own_all_save() -> None:
    clock = [100.0]
    board = Rescues(lambda: clock[0])
    first, second = at(7, disk=0, disks=2), at(7, disk=1, disks=2)
    assert not board.stand("world", 1, first).writers, "the other node may be about to speak"
    assert not board.stand("world", 2, second).writers
    clock[0] += SETTLED + 0.1
    assert board.stand("world", 1, first) == Rescue(7, (1, 2), 1)
    board.rescued("world", 1, 1)
    assert board.pending, "it stands on one disk"
    board.hear(Event("failure", {"world": "world", "rank": 2}))
    assert board.stand("world", 1, first) == Rescue(7, (1,), 2)
    board.rescued("world", 2, 1)
    assert not board.pending


def test_nobody_waits_for_ever() -> None:
    clock = [100.0]
    board = Rescues(lambda: clock[0])
    half = at(7, part=1, parts=2)
    assert not board.stand("world", 3, half).over
    clock[0] += PATIENCE + 0.1
    assert board.stand("world", 3, half) == Rescue(attempt=0, over=True)
    board.stand("another", 3, half)
    assert board.pending
    clock[0] += SILENT + 0.1
    assert not board.pending, "they have died"


def test_the_dead_are_not_waited_for() -> None:
    board = Rescues(lambda: 0.0)
    for rank in (0, 1):
        board.hear(Event("failure", {"world": "world", "rank": rank, "signal": "SIGKILL"}))
    assert not board.stand("world", 2, at(7, ready=True)).writers
    assert board.stand("world", 3, at(7, ready=True)) == Rescue(7, (2,), 1)
    board.hear(Event("failure", {"world": "world", "rank": 2}))
    assert board.stand("world", 3, at(7, ready=True)) == Rescue(7, (3,), 2)


def test_all_being_there_is_no_reason_to_wait() -> None:
    board = Rescues(lambda: 0.0)
    for rank in range(3):
        assert not board.stand("world", rank, at(7, ready=True)).writers
    assert board.stand("world", 3, at(7, ready=True)) == Rescue(7, (0,), 1)


def test_no_two_worlds_have_the_same_token() -> None:
    """Those of a world whose nodes are all away now are on disks that nobody sees."""
    board = Rescues(lambda: 0.0)
    assert [board.token(above) for above in (0, 0, 5, 3)] == [1, 2, 6, 7]
