"""Several commands at one run: one change at a time, nobody's work destroyed by another's, and nothing half made.

Everything is done as from several machines: each command has a launcher of its own, which knows nothing of the others.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from stand_in import RUN, SILENT, docker, nothing_left, say, task_ids

from swarmtrain.errors import RunNotFound, StackError, SwarmtrainError
from swarmtrain.lab import Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher, lock, observe
from swarmtrain.launchers.swarm.patience import Patience
from swarmtrain.plan import Plan


class Command(threading.Thread):
    """A command in a thread: what it says, and how it ends."""

    def __init__(self, do: Callable[[Callable[[str], None]], None]) -> None:
        super().__init__(daemon=True)
        self._do = do
        self.said: list[str] = []
        self.error: SwarmtrainError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._do(self.said.append)
        except SwarmtrainError as error:
            self.error = error

    def end(self) -> SwarmtrainError | None:
        self.join(120)
        assert not self.is_alive(), self.said
        return self.error

    def await_saying(self, words: str) -> None:
        end = time.monotonic() + 60
        while not any(words in line for line in self.said):
            assert time.monotonic() < end, f"{words!r} not in {self.said}"
            assert self.is_alive() or any(words in line for line in self.said), (self.said, self.error)
            time.sleep(0.02)


@pytest.fixture
def another(lab: Lab, launcher: SwarmLauncher) -> Callable[[], SwarmLauncher]:
    """Return a function that makes launchers as on other machines; what they leave is taken down by the fixture `launcher`."""
    return lambda: SwarmLauncher(lab.docker_host("node0"))


def test_two_deploys_at_once_end_in_the_last_one(
    lab: Lab, another: Callable[[], SwarmLauncher], planned: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    first = Command(lambda say: another().up(planned(), say))
    first.await_saying("create service demo_rendezvous")
    second = Command(lambda say: another().up(planned(nodes=3), say))
    told, fine = first.end(), second.end()
    assert fine is None, second.said
    assert isinstance(told, StackError)
    assert told.message.endswith("this command leaves everything alone")
    assert "nothing is removed" in first.said[-1]
    assert {(task.node, task.state) for task in launcher.tasks(RUN)} == {
        (node, "running") for node in ("node0", "node1", "node2", "rendezvous")
    }
    assert {name: len(ids) for name, ids in task_ids(launcher._engine).items()} == {
        f"demo_{name}": 1 for name in ("node0", "node1", "node2", "rendezvous")
    }
    # Nobody's services were made anew, and the lock is gone with the last of them.
    assert "demo_lock" not in docker(lab, "config", "ls")
    assert [line.partition(":")[0] for line in second.said if "create" in line] == ["create service demo_node2"]


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_an_interrupted_deploy_leaves_alone_what_another_has_taken_over(
    another: Callable[[], SwarmLauncher], planned: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    """The other one wanted the same, and so has changed nothing: it is its run all the same."""
    reached, go_on = threading.Event(), threading.Event()

    def interrupt(line: str) -> None:
        if "node0 on node0: " in line:
            reached.set()
            go_on.wait(60)
            raise StackError("as if interrupted")

    first = Command(lambda _: another().up(planned(), interrupt))
    assert reached.wait(60)
    another().up(planned(), say)
    go_on.set()
    assert str(first.end()) == "as if interrupted"
    assert {task.state for task in launcher.tasks(RUN)} == {"running"}


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_a_deploy_that_hangs_is_broken_off_by_down(
    lab: Lab, another: Callable[[], SwarmLauncher], planned: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    """It waits for a node that nobody can be."""
    plan = planned()
    plan = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], constraint="node.labels.colour==green")))
    waits = Command(lambda say: another().up(plan, say))
    waits.await_saying("no suitable node")
    again = Command(lambda say: another().down(RUN, say))
    another().down(RUN, say)
    error = waits.end()
    assert isinstance(error, StackError)
    assert "meanwhile" in error.message
    assert again.end() is None
    assert nothing_left(lab, launcher._engine)


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_a_deploy_over_a_run_that_is_going_down(
    lab: Lab, another: Callable[[], SwarmLauncher], planned: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    launcher.up(planned(), SILENT)
    going = Command(lambda say: another().down(RUN, say))
    going.await_saying("removing demo_node0")
    # Whoever asks meanwhile is told; whoever changes something waits.
    end = time.monotonic() + 10
    while {task.state for task in launcher.tasks(RUN) if task.node != "rendezvous"} - {"stopping"}:
        assert time.monotonic() < end
        time.sleep(0.1)
    over = Command(lambda say: another().up(planned(nodes=1), say))
    over.await_saying("takes it down, since")
    assert going.end() is None
    assert over.end() is None, over.said
    assert [(task.node, task.state) for task in launcher.tasks(RUN)] == [("node0", "running"), ("rendezvous", "running")]
    going = Command(lambda say: another().down(RUN, say))
    going.await_saying("removing demo_node0")
    others = [Command(lambda say: another().down(RUN, say)), Command(lambda say: another().stop(RUN, say))]
    for other in others:
        other.await_saying("takes it down, since")
    assert going.end() is None
    assert others[0].end() is None
    assert isinstance(others[1].end(), RunNotFound)
    assert nothing_left(lab, launcher._engine)


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_what_docker_stack_rm_leaves_is_waited_for(
    lab: Lab, another: Callable[[], SwarmLauncher], planned: Callable[..., Plan], launcher: SwarmLauncher
) -> None:
    launcher.up(planned(), SILENT)
    docker(lab, "stack", "rm", RUN)
    assert launcher.runs() == []
    assert launcher.leaving() == [RUN]
    for refused in (launcher.tasks, launcher.events, launcher.watch, launcher.deployed):
        with pytest.raises(RunNotFound, match="it is going down"):
            refused(RUN)
    for refused in (lambda: launcher.logs(RUN, follow=False), lambda: launcher.stop(RUN, say)):
        with pytest.raises(RunNotFound, match="it is going down"):
            refused()
    said: list[str] = []
    launcher.up(planned(), said.append)
    assert {task.state for task in launcher.tasks(RUN)} == {"running"}
    docker(lab, "stack", "rm", RUN)
    launcher.down(RUN, say)
    assert nothing_left(lab, launcher._engine)
    assert launcher.leaving() == []
    # While docker still removes it, not after.
    launcher.up(planned(), SILENT)
    removal = subprocess.Popen(["docker", "-H", lab.docker_host("node0"), "stack", "rm", RUN], stdout=subprocess.PIPE)
    assert removal.stdout
    removal.stdout.readline()
    another().up(planned(), say)
    removal.communicate()
    with contextlib.suppress(StackError):
        another().up(planned(), say)
    assert len(observe.services(launcher._engine, RUN)) == 3
    assert {task.state for task in launcher.tasks(RUN)} == {"running"}


@pytest.fixture
def dead_lock(launcher: SwarmLauncher) -> Iterator[str]:
    """The lock of a command that was killed while it held it."""
    dead = lock.Lock(launcher._engine, RUN, "brings it up")
    dead._take(SILENT)
    yield dead._name
    launcher._engine.delete(f"/configs/{dead._name}")


def test_the_lock_of_a_killed_command_is_taken_over(launcher: SwarmLauncher, engine: Engine, dead_lock: str) -> None:
    order: list[str] = []

    def change(name: str) -> Callable[[Callable[[str], None]], None]:
        def do(say: Callable[[str], None]) -> None:
            mine = lock.Lock(engine, RUN, f"is {name}", Patience(looks=4))
            with mine.held(say):
                order.append(f"{name} begins")
                time.sleep(1)
                mine.check()
                order.append(f"{name} ends")

        return do

    commands = [Command(change(name)) for name in "abc"]
    assert [command.end() for command in commands] == [None] * 3
    assert all(any("brings it up, since" in line for line in command.said) for command in commands)
    assert [line.split()[1] for line in order] == ["begins", "ends"] * 3
    assert [order[index].split()[0] == order[index + 1].split()[0] for index in (0, 2, 4)] == [True] * 3
    assert observe.observe(engine, RUN).empty


@pytest.mark.test_all_only("each waits for two commands that race; the contract has the changes one at a time")
def test_a_command_that_stood_still_too_long_changes_nothing_more(engine: Engine) -> None:
    asleep = lock.Lock(engine, RUN, "sleeps", Patience(renew=1000.0))
    other = lock.Lock(engine, RUN, "takes over", Patience(renew=1000.0, looks=1))
    with asleep.held(SILENT):
        with other.held(SILENT):
            assert not asleep.mine()
            assert not asleep.take_back()
            with pytest.raises(StackError, match="has lost its turn"):
                asleep.check()
            assert "takes over meanwhile" in asleep.taken().message
        assert not asleep.mine()
    alone = lock.Lock(engine, RUN, "waits", Patience(valid=0.0))
    with alone.held(SILENT), pytest.raises(StackError, match="has lost its turn"):
        alone.check()
    with pytest.raises(StackError, match="somebody has changed it or taken it down meanwhile"):
        asleep.lend()
