"""Records what a run in containers prints in the user's state directory: Swarm forgets a container's log after five restarts."""

from __future__ import annotations

from collections.abc import Iterable

from swarmtrain.launchers.common.container_logs import ContainerLogLine
from swarmtrain.launchers.common.history_store import HistoryWriter
from swarmtrain.protocol import EVENT_USAGE


class LogRecorder:
    """Appends lines to NODE.log, and the coordinator's events also to events.jsonl.

    Lines that an earlier watch has recorded are not repeated.
    """

    def __init__(self, run: str) -> None:
        self._writer = HistoryWriter(run)

    def append(self, line: ContainerLogLine) -> None:
        """Record one line, if possible."""
        event = line.parse_event()
        # A node's resource usage is of interest only while it is current.
        if line.time and not (event and event.kind == EVENT_USAGE):
            self._writer.append(line.node, line.time, line.text, event=event is not None)

    def flush(self) -> None:
        """Flush the files."""
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


def record_lines(run: str, lines: Iterable[ContainerLogLine]) -> None:
    """Record the lines that are not recorded yet."""
    recorder = LogRecorder(run)
    for line in lines:
        recorder.append(line)
    recorder.close()
