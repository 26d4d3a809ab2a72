"""Record the output of a run's containers in the user's state directory: Swarm deletes a container's log after five restarts."""

from __future__ import annotations

from collections.abc import Iterable

from swarmtrain.launchers.common.container_logs import ContainerLogLine
from swarmtrain.launchers.common.history_store import HistoryWriter
from swarmtrain.protocol import EVENT_USAGE


class LogRecorder:
    """Recorder of a run's output: appends lines to NODE.log, and the coordinator's events also to events.jsonl.

    Lines that an earlier recorder has written are skipped.
    """

    def __init__(self, run: str) -> None:
        self._writer = HistoryWriter(run)

    def append_line(self, line: ContainerLogLine) -> None:
        """Append one line to the recorded files. Lines without a timestamp and resource usage events are skipped.

        A write error is ignored.
        """
        event = line.parse_event()
        # A node's resource usage is of interest only while it is current.
        if line.time and not (event and event.kind == EVENT_USAGE):
            self._writer.append_line(line.node, line.time, line.text, is_event=event is not None)

    def flush(self) -> None:
        """Flush the recorded files."""
        self._writer.flush()

    def close(self) -> None:
        """Close the recorded files."""
        self._writer.close()


def record_log_lines(run: str, lines: Iterable[ContainerLogLine]) -> None:
    """Record those of `lines` that are not recorded yet."""
    recorder = LogRecorder(run)
    for line in lines:
        recorder.append_line(line)
    recorder.close()
