"""What was seen of a run in containers goes into the user's state directory: Swarm forgets a container's log after five restarts."""

from __future__ import annotations

from collections.abc import Iterable

from swarmtrain.launchers.kept import Keeper
from swarmtrain.launchers.logs import Line
from swarmtrain.wire import USAGE


class Record:
    """Appends to NODE.log and, what the board says, to events.jsonl. What an earlier watch has written is not written again."""

    def __init__(self, run: str) -> None:
        self._keeper = Keeper(run)

    def add(self, line: Line) -> None:
        """Write one line down, if that is possible."""
        event = line.event()
        # What a node used is of interest while it does.
        if line.time and not (event and event.kind == USAGE):
            self._keeper.add(line.node, line.time, line.text, event=event is not None)

    def flush(self) -> None:
        """Hand everything to the system."""
        self._keeper.flush()

    def close(self) -> None:
        """Close the files."""
        self._keeper.close()


def keep(run: str, lines: Iterable[Line]) -> None:
    """Write down the lines that were not before."""
    record = Record(run)
    for line in lines:
        record.add(line)
    record.close()
