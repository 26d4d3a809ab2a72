"""What `swarmtrain why` names as the first to fail after each fault of tests/lab/faults.py, as a regular expression.

An empty text: nothing has failed, so that `why` names nobody. The recordings in tests/unit/faults are events and tasks of real runs with
these faults: the chaos tests write them with SWARMTRAIN_DOCS set. Two are derived from other recordings, with the events that the agent and
the trainer post: `a rank is killed` from `torchrun is killed`, and `the disk is full` from `save_dir vanishes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from swarmtrain import protocol
from swarmtrain.launchers.base import TaskExit, TaskState
from swarmtrain.protocol import Event

RECORDINGS = Path(__file__).parent / "unit" / "faults"
_ANY_NODE = r"node[012]"
_RECORDED_KINDS = (
    protocol.EVENT_COORDINATOR_STARTED,
    protocol.EVENT_NODE_JOINED,
    protocol.EVENT_WORLD_FORMED,
    protocol.EVENT_RESUMED,
    protocol.EVENT_FAILURE,
    protocol.EVENT_NOTE,
    protocol.EVENT_NODE_LEFT,
    protocol.EVENT_NODE_QUARANTINED,
    protocol.EVENT_OUTCOME,
)
SUSPECTS = {
    "a rank is killed": r"node1 rank \d",
    "torchrun is killed": "node1",
    "a container is killed": "node2",
    "the coordinator is killed": "rendezvous",
    "a machine dies, and comes back after 30 s": "node2",
    "the manager's machine dies, and comes back after 5 s": "node0",
    "a rank hangs": r"node1 rank \d",
    "a link is cut for 5 s": r"(node2( rank \d)?)?",  # the connections may survive it
    "a link is cut for 60 s": "node2",
    "a link is cut one way for 20 s": r"node2( rank \d)?",
    "a link is slowed to 10 Mbit": "",
    "the disk is full": "",
    "save_dir vanishes": "",
    "the newest checkpoint is truncated, all containers killed": _ANY_NODE,
    "a bit of the newest checkpoint flips, all containers killed": _ANY_NODE,
    "the newest checkpoint is renamed in part, all containers killed": _ANY_NODE,
    "the newest checkpoint is deleted, all containers killed": _ANY_NODE,
    "a rank and a container are killed at once": r"node1 rank \d|node2",
    "a container is killed while a checkpoint is written": "node1",
    "a rank is killed while a checkpoint is read": r"node2 rank \d",
    "a container is killed during rendezvous": "node[12]",
    "a container is killed while the run is scaled": "node1",
    "a container is killed, and its disk is lost": "node2",
    "all containers are killed at once": _ANY_NODE,
    "the run is scaled to 2 nodes, and to 3 again": "",
    "a node is drained, and made active again": "",
    "a service is updated by force": "",
    "a node comes back with a clock that is an hour wrong": "",
    "a node's clock jumps an hour ahead": "",
    "a learner's container is killed during an outer step (DiLoCo)": "node1",
    "a learner's container is killed while a fragment is exchanged (DiLoCo)": "node1",
    "a container is killed while micro batches are reassigned by speed": "node1",
}


def find_suspect(diagnosis_text: str) -> str:
    """Return the node, and its rank if it is known, that the output of `swarmtrain why` names as the first to fail; empty if none."""
    match = re.search(r"^  first   (node\d+(?: rank \d+)?|rendezvous)", diagnosis_text, re.MULTILINE)
    return match[1] if match else ""


def write_recording(fault: str, events: Iterable[Event], tasks: Sequence[TaskState]) -> None:
    """Write the events and tasks of a run with `fault` to its recording, without tracebacks."""
    lines = [
        Event(event.kind, {key: value for key, value in event.data.items() if key != "traceback"}, event.time).to_line()
        for event in events
        if event.kind in _RECORDED_KINDS
    ]
    task_lines = [json.dumps(asdict(task)) for task in tasks]
    _get_recording_path(fault).write_text("\n".join([*lines, *task_lines, ""]))


def read_recording(fault: str) -> tuple[list[Event], list[TaskState]]:
    """Return the events and tasks of the recorded run with `fault`."""
    lines = _get_recording_path(fault).read_text().splitlines()
    events = [event for line in lines if (event := Event.from_line(line))]
    tasks = []
    for record in map(json.loads, lines[len(events) :]):
        exits = tuple(TaskExit(**task_exit) for task_exit in record.pop("exits"))
        tasks.append(TaskState(**{**record, "gpus": tuple(record["gpus"]), "exits": exits}))
    return events, tasks


def _get_recording_path(fault: str) -> Path:
    return RECORDINGS / f"{re.sub(r'[^a-z0-9]+', '-', fault.lower()).strip('-')}.jsonl"
