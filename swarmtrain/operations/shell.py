"""Open a shell, or run another program, where the ranks of a node run. The launcher builds the command; exec replaces this process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from swarmtrain import protocol
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import RunNotFound, StackError, SwarmtrainError
from swarmtrain.launchers.base import Launcher, TaskState
from swarmtrain.launchers.task_words import describe_task_reason
from swarmtrain.process import exec_command
from swarmtrain.protocol import Event
from swarmtrain.view.console import print_message

_DEFAULT_SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
_RUNNING_STATE = "running"


def open_node_shell(launcher: Launcher, run: str, *, rank: int | None, node: str | None, argv: Sequence[str]) -> NoReturn:
    """Replace this process with `argv`, by default a shell, where `node` runs, or the node of `rank` (by default rank 0).

    With a terminal, the program gets a terminal too. Raises RunNotFound if the run has no such rank or node, StackError if the node is not
    running, and SwarmtrainError if this machine lacks the program that connects to the node, such as docker.
    """
    tasks = {task.node: task for task in launcher.list_tasks(run) if task.node != protocol.RENDEZVOUS_SERVICE}
    node = node or _find_node_of_rank(launcher.read_events(run), rank, run, tasks)
    _check_node_running(tasks, node, run)
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    command = launcher.build_node_command(run, node, argv or _DEFAULT_SHELL, with_terminal=is_interactive)
    program, environment = command.argv[0], {**os.environ, **command.env}
    try:
        os.chdir(command.cwd)
    except OSError as error:
        raise SwarmtrainError(f"cannot be used: {describe_os_error(error)}", place=command.cwd) from None
    if shutil.which(program, path=environment.get("PATH")) is None:
        hint = f"install {program} on this machine, or use the path of another program"
        raise SwarmtrainError(f"{program}: no such program", place=f"run {run} {node}", hint=hint)
    if is_interactive:
        print_message(f"{node} on {tasks[node].host}; the run continues when you exit")
    exec_command(command.argv, env=environment)


def _find_node_of_rank(events: Sequence[Event], rank: int | None, run: str, tasks: dict[str, TaskState]) -> str:
    """Return the node of `rank` in the newest world; without a rank, of rank 0, or, before the first world, the first node."""
    world = next((event.data for event in reversed(events) if event.kind == protocol.EVENT_WORLD_FORMED), None)
    if world is None:
        if rank is None and tasks:  # no tasks: leftovers of an incomplete removal
            return next(iter(tasks))
        raise StackError("no world has formed, so its ranks have no nodes yet", place=f"run {run}", hint="use --node NODE")
    ranks_by_node: dict[str, list[int]] = world["ranks"]
    if node := next((name for name, ranks in ranks_by_node.items() if (rank or 0) in ranks), None):
        return node
    raise RunNotFound(f"unknown rank; the newest world has the ranks 0 to {world['world_size'] - 1}", place=f"run {run} rank {rank}")


def _check_node_running(tasks: dict[str, TaskState], node: str, run: str) -> None:
    if node not in tasks:
        raise RunNotFound(f"unknown node; its nodes: {', '.join(tasks)}", place=f"run {run} {node}")
    task = tasks[node]
    if task.state != _RUNNING_STATE:
        reason = f" ({task_reason})" if (task_reason := describe_task_reason(task)) else ""
        raise StackError(f"is not running, but {task.state}{reason}", place=f"run {run} {node}", hint=f"swarmtrain why {run}")
