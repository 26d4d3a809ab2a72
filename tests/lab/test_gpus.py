"""Runs that reserve the same GPUs, on engines that declare some: each gets all of its own at once, in the order in which they came."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stand_in import docker, say

from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.errors import RunNotFound, StackError
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher, observe
from swarmtrain.plan import Cargo, CodeFile, Plan, make_plan
from swarmtrain.render.compose import stack, write


@pytest.fixture(scope="module")
def gpus(new_lab: Callable[[str], Lab], stand_in: str) -> Lab:
    """Two nodes with two GPUs each. The image comes from the registry, which all labs of these tests share."""
    lab = new_lab("gpus")
    lab.up(2, gpus=2, say=say)
    return lab


@pytest.fixture
def launcher(gpus: Lab) -> Iterator[SwarmLauncher]:
    made = SwarmLauncher(gpus.docker_host("node0"))
    yield made
    for run in {*made.runs(), *made.leaving()}:
        with contextlib.suppress(RunNotFound):  # a deploy that was still waiting has left
            made.down(run, say)


@pytest.fixture
def wanting(launcher: SwarmLauncher, stand_in: str) -> Callable[..., Plan]:
    """Return a function that plans a run by its name and hosts."""

    def make(run: str, *hosts: str) -> Plan:
        runner = {"hosts": hosts, "swarm": {"gpu": GpuMode.reserve}, "stop_grace": 5, "docker_config": {"docker_container": stand_in}}
        cargo = Cargo((CodeFile.of("training_code.py", b"train()\n"),))
        return make_plan(Config.model_validate({"runner": runner}), launcher.inventory(), cargo, run=run)

    return make


class Deploy(threading.Thread):
    """A deploy in the background; `said` is what it has told so far."""

    def __init__(self, lab: Lab, plan: Plan) -> None:
        super().__init__(daemon=True)
        self._lab, self._plan = lab, plan
        self.said: list[str] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            SwarmLauncher(self._lab.docker_host("node0")).up(self._plan, self.said.append)
        except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
            self.error = error

    def ends(self) -> bool:
        """Say whether it comes to its end, within 60 s, with the run up."""
        self.join(60)
        say("\n".join([*self.said, str(self.error)]))
        return not self.is_alive() and self.error is None

    def waits_for(self, words: str) -> bool:
        """Say whether it comes to tell, within 10 s, that it waits, in these words."""
        return until(lambda: any("waiting until all" in line and words in line for line in self.said))


def until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return met


def holding(launcher: SwarmLauncher, run: str) -> list[tuple[str, ...]]:
    """Return the GPUs that each node of the run has."""
    return [task.gpus for task in launcher.tasks(run) if task.node != "rendezvous"]


def test_runs_that_want_the_same_gpus_wait_as_a_whole_and_in_order(
    gpus: Lab, launcher: SwarmLauncher, wanting: Callable[..., Plan]
) -> None:
    launcher.up(wanting("first", "node0 slots=2"), say)
    assert {*holding(launcher, "first")[0]} == {"GPU-node0-1", "GPU-node0-2"}
    # It would have node1 at once, and keep it from others while it waits for node0.
    second = Deploy(gpus, wanting("second", "node0", "node1"))
    assert second.waits_for("node0 has 2, 2 wanted, first has 2")
    # What it waits for is not given to who comes later, though node1 is free.
    third = Deploy(gpus, wanting("third", "node1 slots=1"))
    assert third.waits_for("node1 has 2, 1 wanted, run second waits for 2")
    assert launcher.runs() == ["first"]
    with pytest.raises(RunNotFound, match="waits for NVIDIA-GPU of other runs"):
        launcher.tasks("second")
    # A container that is started again has its GPUs still.
    docker(gpus, "kill", docker(gpus, "ps", "-q", "--filter", "name=first_node0").strip())
    assert until(lambda: "137" in str([task.reason for task in observe.tasks(launcher._engine, "first")]))
    assert until(lambda: len(holding(launcher, "first")[0]) == 2, 20)
    assert launcher.runs() == ["first"]
    launcher.stop("first", say)
    assert second.ends()
    assert [len(ids) for ids in holding(launcher, "second")] == [2, 2]
    # The first is stopped and has none; it comes back when it is its turn.
    again = Deploy(gpus, wanting("first", "node0 slots=2"))
    assert again.waits_for("second has 2")
    launcher.down("third", say)
    third.join(20)
    assert isinstance(third.error, StackError)
    assert "takes it down meanwhile" in str(third.error) or "taken it down" in str(third.error)
    launcher.down("second", say)
    assert again.ends()
    assert [len(ids) for ids in holding(launcher, "first")] == [2]
    assert docker(gpus, "config", "ls", "--filter", "label=swarmtrain.queue.run", "-q") == ""


def test_what_docker_stack_deploy_started_waits_one_by_one_and_is_told_for_whom(
    gpus: Lab, launcher: SwarmLauncher, wanting: Callable[..., Plan], tmp_path: Path
) -> None:
    launcher.up(wanting("first", "node0 slots=1"), say)
    write(stack(wanting("second", "node0 slots=2", "node1 slots=2")), tmp_path / "generated.yml")
    docker(gpus, "stack", "deploy", "-c", f"{tmp_path}/generated.yml", "second")
    assert until(lambda: any("first has 1 of 2 NVIDIA-GPU" in task.reason for task in launcher.tasks("second")), 20)
    third = Deploy(gpus, wanting("third", "node0 slots=1"))
    assert third.waits_for("first has 1, second has 2")
    launcher.down("third", say)
    third.join(20)
