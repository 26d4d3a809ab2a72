"""Several commands on one run: one change at a time; no command destroys another's work or leaves a partial change.

Commands run as if on different machines: each has its own launcher, which knows nothing of the others.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from swarm_helpers import DISCARD, RUN, is_run_removed, list_task_ids, print_line, run_docker

from swarmtrain.errors import RunNotFound, StackError, SwarmtrainError
from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state, run_lock
from swarmtrain.launchers.swarm.timeouts import SwarmTimeouts
from swarmtrain.planning.plan import Plan


class CommandThread(threading.Thread):
    """A command in a thread: its messages, and how it ends."""

    def __init__(self, command: Callable[[Callable[[str], None]], None]) -> None:
        super().__init__(daemon=True)
        self._command = command
        self.messages: list[str] = []
        self.error: SwarmtrainError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._command(self.messages.append)
        except SwarmtrainError as error:
            self.error = error

    def wait_for_end(self) -> SwarmtrainError | None:
        self.join(120)
        assert not self.is_alive(), self.messages
        return self.error

    def wait_for_message(self, text: str) -> None:
        end = time.monotonic() + 60
        while not any(text in line for line in self.messages):
            assert time.monotonic() < end, f"{text!r} not in {self.messages}"
            assert self.is_alive() or any(text in line for line in self.messages), (self.messages, self.error)
            time.sleep(0.02)


@pytest.fixture
def create_launcher(lab: Lab, launcher: SwarmLauncher) -> Callable[[], SwarmLauncher]:
    """Return a function that makes launchers as if on other machines. The fixture `launcher` takes down what they leave."""
    return lambda: SwarmLauncher(lab.get_docker_host("node0"))


def test_two_deploys_at_once_end_in_the_last_one(
    lab: Lab, create_launcher: Callable[[], SwarmLauncher], plan_run: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    first = CommandThread(lambda say: create_launcher().deploy_run(plan_run(), say))
    first.wait_for_message("create service demo_rendezvous")
    second = CommandThread(lambda say: create_launcher().deploy_run(plan_run(nodes=3), say))
    stack_error, fine = first.wait_for_end(), second.wait_for_end()
    assert fine is None, second.messages
    assert isinstance(stack_error, StackError)
    assert stack_error.message.endswith("this command makes no more changes")
    assert "nothing is removed" in first.messages[-1]
    assert {(task.node, task.state) for task in launcher.list_tasks(RUN)} == {
        (node, "running") for node in ("node0", "node1", "node2", "rendezvous")
    }
    assert {name: len(ids) for name, ids in list_task_ids(launcher._engine).items()} == {
        f"demo_{name}": 1 for name in ("node0", "node1", "node2", "rendezvous")
    }
    # No service was recreated, and the lock is removed together with the last command.
    assert "demo_lock" not in run_docker(lab, "config", "ls")
    assert [line.partition(":")[0] for line in second.messages if line.startswith("create ")] == ["create service demo_node2"]


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_an_interrupted_deploy_leaves_alone_what_another_has_taken_over(
    create_launcher: Callable[[], SwarmLauncher], plan_run: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    """The second deploy wanted the same and so changed nothing, but it owns the run now."""
    reached, go_on = threading.Event(), threading.Event()

    def interrupt(line: str) -> None:
        if "node0 on node0: " in line:
            reached.set()
            go_on.wait(60)
            raise StackError("as if interrupted")

    first = CommandThread(lambda _: create_launcher().deploy_run(plan_run(), interrupt))
    assert reached.wait(60)
    create_launcher().deploy_run(plan_run(), print_line)
    go_on.set()
    assert str(first.wait_for_end()) == "as if interrupted"
    assert {task.state for task in launcher.list_tasks(RUN)} == {"running"}


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_a_deploy_that_hangs_is_canceled_by_down(
    lab: Lab, create_launcher: Callable[[], SwarmLauncher], plan_run: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    """It waits for a node that does not exist."""
    plan = plan_run()
    plan = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], constraint="node.labels.colour==green")))
    waits = CommandThread(lambda say: create_launcher().deploy_run(plan, say))
    waits.wait_for_message("no machine of the swarm meets its constraints")
    again = CommandThread(lambda say: create_launcher().tear_down_run(RUN, say))
    create_launcher().tear_down_run(RUN, print_line)
    error = waits.wait_for_end()
    assert isinstance(error, StackError)
    assert "in the meantime" in error.message
    assert again.wait_for_end() is None
    assert is_run_removed(lab, launcher._engine)


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_a_deploy_over_a_run_that_is_going_down(
    lab: Lab, create_launcher: Callable[[], SwarmLauncher], plan_run: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    launcher.deploy_run(plan_run(), DISCARD)
    going = CommandThread(lambda say: create_launcher().tear_down_run(RUN, say))
    going.wait_for_message("removing demo_node0")
    # Commands that only read answer at once; commands that change something wait.
    end = time.monotonic() + 10
    while {task.state for task in launcher.list_tasks(RUN) if task.node != "rendezvous"} - {"stopping"}:
        assert time.monotonic() < end
        time.sleep(0.1)
    over = CommandThread(lambda say: create_launcher().deploy_run(plan_run(nodes=1), say))
    over.wait_for_message("is removing it, since")
    assert going.wait_for_end() is None
    assert over.wait_for_end() is None, over.messages
    assert [(task.node, task.state) for task in launcher.list_tasks(RUN)] == [("node0", "running"), ("rendezvous", "running")]
    going = CommandThread(lambda say: create_launcher().tear_down_run(RUN, say))
    going.wait_for_message("removing demo_node0")
    others = [
        CommandThread(lambda say: create_launcher().tear_down_run(RUN, say)),
        CommandThread(lambda say: create_launcher().stop_run(RUN, say)),
    ]
    for other in others:
        other.wait_for_message("is removing it, since")
    assert going.wait_for_end() is None
    assert others[0].wait_for_end() is None
    assert isinstance(others[1].wait_for_end(), RunNotFound)
    assert is_run_removed(lab, launcher._engine)


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_what_docker_stack_rm_leaves_is_waited_for(
    lab: Lab, create_launcher: Callable[[], SwarmLauncher], plan_run: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    launcher.deploy_run(plan_run(), DISCARD)
    run_docker(lab, "stack", "rm", RUN)
    assert launcher.list_runs() == []
    assert launcher.list_terminating_runs() == [RUN]
    for refused in (launcher.list_tasks, launcher.read_events, launcher.watch_run, launcher.load_deployment):
        with pytest.raises(RunNotFound, match="is being removed"):
            refused(RUN)
    for refused in (lambda: launcher.stream_logs(RUN, follow=False), lambda: launcher.stop_run(RUN, print_line)):
        with pytest.raises(RunNotFound, match="is being removed"):
            refused()
    said: list[str] = []
    launcher.deploy_run(plan_run(), said.append)
    assert {task.state for task in launcher.list_tasks(RUN)} == {"running"}
    run_docker(lab, "stack", "rm", RUN)
    launcher.tear_down_run(RUN, print_line)
    assert is_run_removed(lab, launcher._engine)
    assert launcher.list_terminating_runs() == []
    # While docker is still removing the stack, not afterwards.
    launcher.deploy_run(plan_run(), DISCARD)
    removal = subprocess.Popen(["docker", "-H", lab.get_docker_host("node0"), "stack", "rm", RUN], stdout=subprocess.PIPE)
    assert removal.stdout
    removal.stdout.readline()
    create_launcher().deploy_run(plan_run(), print_line)
    removal.communicate()
    with contextlib.suppress(StackError):
        create_launcher().deploy_run(plan_run(), print_line)
    assert len(cluster_state.list_services(launcher._engine, RUN)) == 3
    assert {task.state for task in launcher.list_tasks(RUN)} == {"running"}


@pytest.fixture
def stale_lock(launcher: SwarmLauncher) -> Iterator[str]:
    """The lock of a command that was killed while it held it."""
    stale_lock = run_lock.RunLock(launcher._engine, RUN, "is deploying it")
    stale_lock._wait_and_acquire_lock(DISCARD)
    yield stale_lock._name
    launcher._engine.delete(f"/configs/{stale_lock._name}")


def test_the_lock_of_a_killed_command_is_taken_over(launcher: SwarmLauncher, engine: DockerEngine, stale_lock: str) -> None:
    order: list[str] = []

    def change(name: str) -> Callable[[Callable[[str], None]], None]:
        def do(report_progress: Callable[[str], None]) -> None:
            lock = run_lock.RunLock(engine, RUN, f"is {name}", SwarmTimeouts(stale_lock_polls=4))
            with lock.hold_lock(report_progress):
                order.append(f"{name} begins")
                time.sleep(1)
                lock.check_lock_held()
                order.append(f"{name} ends")

        return do

    commands = [CommandThread(change(name)) for name in "abc"]
    assert [command.wait_for_end() for command in commands] == [None] * 3
    assert all(any("is deploying it, since" in line for line in command.messages) for command in commands)
    assert [line.split()[1] for line in order] == ["begins", "ends"] * 3
    assert [order[index].split()[0] == order[index + 1].split()[0] for index in (0, 2, 4)] == [True] * 3
    assert cluster_state.read_stack_state(engine, RUN).is_empty


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_a_command_that_stalled_too_long_changes_nothing_more(engine: DockerEngine) -> None:
    asleep = run_lock.RunLock(engine, RUN, "sleeps", SwarmTimeouts(lock_renew_seconds=1000.0))
    other = run_lock.RunLock(engine, RUN, "takes over", SwarmTimeouts(lock_renew_seconds=1000.0, stale_lock_polls=1))
    with asleep.hold_lock(DISCARD):
        with other.hold_lock(DISCARD):
            assert not asleep.is_held_by_this_command()
            assert not asleep.reacquire_lock()
            with pytest.raises(StackError, match="has lost the lock"):
                asleep.check_lock_held()
            assert "takes over in the meantime" in asleep.build_preemption_error().message
        assert not asleep.is_held_by_this_command()
    alone = run_lock.RunLock(engine, RUN, "waits", SwarmTimeouts(lock_valid_seconds=0.0))
    with alone.hold_lock(DISCARD), pytest.raises(StackError, match="has lost the lock"):
        alone.check_lock_held()
    with pytest.raises(StackError, match="another command has changed or removed it in the meantime"):
        asleep.allow_preemption()
