"""The table of states in the user's words: each state of an engine has an entry, and engine messages are printed in plain words."""

from __future__ import annotations

import pytest

from swarmtrain import protocol
from swarmtrain.launchers.base import QUEUED_STATE, TaskState
from swarmtrain.launchers.swarm.cluster_state import FINAL_STATES, Service, Task
from swarmtrain.launchers.swarm.task_states import build_task_state
from swarmtrain.launchers.task_words import STATE_REASONS, describe_task_reason, format_task_state
from swarmtrain.protocol import LABEL_HOST, Event
from swarmtrain.view.status import build_status

# https://docs.docker.com/engine/swarm/how-swarm-mode-works/swarm-task-states/
SWARM_STATES = {"new", "pending", "assigned", "accepted", "ready", "preparing", "starting", "running", "complete", "failed", "shutdown"}
SWARM_STATES |= {"allocated", "rejected", "orphaned", "remove"}
CONTAINER_STATES = {"running", "paused", "dead"}  # container_state.py maps the others to Swarm's
OWN_STATES = {QUEUED_STATE, "stopped", "stopping", "removed", "unreachable", "down"}
NOT_SATISFIED = "no suitable node (scheduling constraints not satisfied on 3 nodes)"


def test_each_state_has_an_entry_and_no_other() -> None:
    assert STATE_REASONS.keys() == SWARM_STATES | CONTAINER_STATES | OWN_STATES
    assert STATE_REASONS.keys() >= FINAL_STATES


@pytest.mark.parametrize("state", sorted(SWARM_STATES - FINAL_STATES - {"running"}))
def test_a_service_that_does_not_run_yet_has_a_reason(state: str) -> None:
    assert describe_task_reason(TaskState("node0", "a", state))


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (
            TaskState("node1", "b", "preparing"),
            "node1 on b: preparing, its machine pulls the image if it does not have it, and creates the container",
        ),
        (TaskState("node1", "b", "pending", NOT_SATISFIED, machine_problem="down"), "node1 on b: pending, waits for b, which is down"),
        (TaskState("node1", "b", "pending", NOT_SATISFIED), "node1 on b: pending, no machine of the swarm meets its constraints"),
        (
            TaskState("node1", "b", "pending", "no suitable node (insufficient resources on 1 node); big has 2 of 2 gpu"),
            "node1 on b: pending, no machine has the reserved resources free; big has 2 of 2 gpu",
        ),
        (
            TaskState(
                "node1", "", "pending", "no suitable node (2 nodes not available for new tasks; host-mode port already in use on 1 node)"
            ),
            "node1: pending, no machine can run it: 2 nodes not available for new tasks; host-mode port already in use on 1 node",
        ),
        (
            TaskState("node1", "b", "starting", "restarting after: task: non-zero exit (137)"),
            "node1 on b: starting, restarting after: its container was killed, exit code 137",
        ),
        (TaskState("node1", "b", "failed", "task: non-zero exit (7)", 7), "node1 on b: failed, its container exited with exit code 7"),
        (TaskState("node1", "b", "running"), "node1 on b: running"),
        (TaskState("node1", "b", "rejected", "something new of Docker"), "node1 on b: rejected, something new of Docker"),
    ],
)
def test_a_state_is_printed_in_the_users_words(task: TaskState, line: str) -> None:
    assert format_task_state(task) == line


def test_a_pending_service_whose_machine_is_down_has_that_reason() -> None:
    spec = {"Name": "r_node1", "Labels": {LABEL_HOST: "b"}, "Mode": {"Replicated": {"Replicas": 1}}}
    tasks = [Task("t", "s", "", "pending", "running", NOT_SATISFIED, None, "")]
    state = build_task_state("node1", tasks, Service("s", 1, spec), {}, {"b": "down"})
    assert describe_task_reason(state) == "waits for b, which is down"


STARTED = Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 1.0)
JOINED = [Event(protocol.EVENT_NODE_JOINED, {"node": f"node{number}"}, 2.0) for number in range(2)]
RUNNING = [TaskState("node0", "a", "running"), TaskState("node1", "b", "running"), TaskState("rendezvous", "a", "running")]


@pytest.mark.parametrize(
    ("events", "tasks", "reason"),
    [
        (
            [],
            [TaskState("node0", "a", "preparing"), TaskState("node1", "b", "assigned"), RUNNING[2]],
            "node0 on a: preparing, its machine pulls the image if it does not have it, and creates the container; "
            "1 other service not running yet",
        ),
        ([], RUNNING, "the coordinator's process is starting"),
        ([STARTED, JOINED[0]], RUNNING, "the processes of node1 are starting, which takes longer on a busy machine"),
        ([STARTED, *JOINED], RUNNING, "all nodes have joined; their ranks are starting, and then form a world"),
        ([STARTED, *JOINED, Event(protocol.EVENT_WORLD_FORMED, {"world_size": 2, "nodes": 2}, 3.0)], RUNNING, ""),
    ],
)
def test_a_run_that_is_starting_says_what_it_waits_for(events: list[Event], tasks: list[TaskState], reason: str) -> None:
    status = build_status("demo", events, tasks, 100.0)
    assert status.reason == reason
    assert (f"demo: starting{' for 1 min 39 s' if events else ''}, {reason}\n" in str(status)) == bool(reason)
