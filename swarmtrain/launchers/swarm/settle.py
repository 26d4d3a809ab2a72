"""Waiting until a stack runs: what each service waits for in Swarm's own words, and when waiting is of no use.

A task that no node can take at the moment is shown and then left to wait: a node may come back. A task that the node
itself refuses (no such image, no such folder) again and again is an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmtrain.errors import StackError
from swarmtrain.launchers import logs
from swarmtrain.launchers.base import Say, TaskState
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe
from swarmtrain.launchers.swarm.observe import Service, Task
from swarmtrain.launchers.swarm.patience import Patience
from swarmtrain.wire import RENDEZVOUS

_POLL = 0.5
_REMIND = 15.0
_START_PATIENCE = 1800.0
# What a node says when it cannot start a container, how often it may, and what to do about it.
_NO_FOLDER = "make the folder on every node, or mount a disk there that all nodes share"
_NO_PROGRAM = "the image needs python3 and swarmtrain in it: swarmtrain image build makes one from any base image"
_HOPELESS = (
    ("bind source path does not exist", 2, _NO_FOLDER),
    ("source path not found", 2, _NO_FOLDER),
    ("No such image: sha256:", 2, "swarmtrain image spread IMAGE gives it to the nodes that do not have it"),
    ("No such image", 2, "docker pull IMAGE on that node shows why; a registry without TLS must be in its engine's insecure-registries"),
    ("executable file not found", 2, _NO_PROGRAM),
    ("non-zero exit (127)", 2, _NO_PROGRAM),
    ("non-zero exit (126)", 2, _NO_PROGRAM),
)
_OTHERWISE = (5, "docker service ps shows every attempt; docker events on that node shows more")
# The managers' own words, not a node's: engines before 25.0.3 say so of whatever reserves GPUs when its node changes in any
# way, as it does when a network comes to it, and start it again. Where it is true, the next task finds no node and waits.
_TAKEN_AWAY = "assigned node no longer meets constraints"
# Nobody keeps the budget for the notice board itself.
_BOARD = (3, "its log says why; an image without swarmtrain needs swarmtrain image build")
# Seconds without a change: for a start, and for a notice board that has failed already.
_STEADY = 0.8
_STEADY_AGAIN = 3.0
_LAST_WORDS = 5


@dataclass
class _Watch:
    """What was told already, and when something last changed."""

    told: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    reminded: float = field(default_factory=time.monotonic)


def known_tasks(engine: Engine, stack: str) -> frozenset[str]:
    """Return the ids of the tasks that are there before anything is changed: their failures are not this deploy's."""
    return frozenset(task.id for task in observe.tasks(engine, stack))


def await_running(
    engine: Engine,
    stack: str,
    old: frozenset[str],
    restarted: frozenset[str],
    *,
    say: Say,
    still_ours: Callable[[], None],
    patience: Patience,
) -> None:
    """Return when every service of `stack` runs, has run, or waits for a node that is not there.

    `old` are the ids of tasks that were there before, `restarted` those of services that get a new one. `still_ours`
    is asked at each look, and raises when somebody else has changed the stack.
    Raises StackError, with the node's reason, for a service that cannot be started.
    """
    watch = _Watch()
    hosts = observe.hosts(engine)
    while True:
        still_ours()
        services = observe.services(engine, stack)
        found = observe.tasks(engine, stack)
        new = [task for task in found if task.id not in old]
        _raise_if_hopeless(engine, stack, services, new, hosts)
        # Until Swarm has made the new task, the newest one is the old: it says nothing.
        stale = {task.id for task in found if task.id in old and task.service in restarted}
        found = [task for task in found if task.id not in stale]
        states = [observe.task_state(service.name.removeprefix(f"{stack}_"), found, service, hosts) for service in services]
        _tell(states, {service.name.removeprefix(f"{stack}_") for service in services if _unchanged(service, found, old)}, watch, say)
        waiting = [state for state in states if not _settled(state)]
        if not waiting and _steady(stack, services, new, watch):
            return
        if waiting and _patience_is_over(waiting, watch, say, patience):
            return
        time.sleep(_POLL)


def _settled(state: TaskState) -> bool:
    if state.state in ("running", "complete", "stopped"):
        return True
    # A container that ran and failed is the job's own affair: the notice board keeps the budget for that.
    return (
        state.node != RENDEZVOUS and "task: non-zero exit" in state.reason and not any(code in state.reason for code in ("(126)", "(127)"))
    )


def _steady(stack: str, services: list[Service], new: list[Task], watch: _Watch) -> bool:
    """Say whether what was started has run long enough not to be a container that fails at once."""
    board = observe.board(services, stack)
    failed = board is not None and any(task.service == board.id and task.state == "failed" for task in new)
    return not new or time.monotonic() - watch.moved > (_STEADY_AGAIN if failed else _STEADY)


def _unchanged(service: Service, found: list[Task], old: frozenset[str]) -> bool:
    task = observe.newest(found, service.id)
    return task is not None and task.id in old and task.state in ("running", "complete")


def _tell(states: list[TaskState], unchanged: set[str], watch: _Watch, say: Say) -> None:
    for state in states:
        if state.node in unchanged:
            continue
        line = _line(state)
        if watch.told.get(state.node) != line:
            watch.told[state.node] = line
            watch.moved = watch.reminded = time.monotonic()
            say(line)


def _line(state: TaskState) -> str:
    where = f" on {state.host}" if state.host else ""
    return f"{state.node}{where}: {state.state}{f', {state.reason}' if state.reason else ''}"


def _patience_is_over(waiting: list[TaskState], watch: _Watch, say: Say, patience: Patience) -> bool:
    now = time.monotonic()
    names = "; ".join(_line(state) for state in waiting)
    pending = all(state.state in ("new", "allocated", "pending") for state in waiting)
    if (pending and now - watch.moved > patience.pending) or now - watch.began > _START_PATIENCE:
        say(f"left waiting: {names}")
        return True
    if now - watch.reminded > _REMIND:
        watch.reminded = now
        say(f"still waiting for: {names}")
    return False


def _raise_if_hopeless(engine: Engine, stack: str, services: list[Service], new: list[Task], hosts: dict[str, str]) -> None:
    complaints = []
    hints = []
    for service in services:
        name = service.name.removeprefix(f"{stack}_")
        refused = [task for task in new if task.service == service.id and _refused(task, board=name == RENDEZVOUS)]
        if not refused:
            continue
        reason = refused[-1].reason
        otherwise = _BOARD if name == RENDEZVOUS and refused[-1].state == "failed" else _OTHERWISE
        limit, hint = next(((limit, hint) for words, limit, hint in _HOPELESS if words.lower() in reason.lower()), otherwise)
        if len(refused) >= limit:
            words = _last_words(engine, service, name) if refused[-1].state == "failed" else ""
            complaints.append(f"{name} on {hosts.get(refused[-1].node, 'no host')}: {reason}{words}")
            hints.append(hint)
    if complaints:
        raise StackError("cannot be started: " + "; ".join(complaints), place=f"run {stack}", hint=hints[0])


def _refused(task: Task, *, board: bool) -> bool:
    """Tell a container that could not be started from one that ran and failed; of the board, both count."""
    if task.state == "failed":
        return board or task.exit_code in (126, 127) or task.reason.startswith("starting container failed")
    return task.state == "rejected" and _TAKEN_AWAY not in task.reason


def _last_words(engine: Engine, service: Service, name: str) -> str:
    lines = [line.text for line in logs.read(engine, service.source, name, tail=_LAST_WORDS) if line.event() is None]
    # The same again but for its numbers is the same.
    return "".join(f"\n  {line}" for line in {re.sub(r"\d+", "", line): line for line in lines}.values())
