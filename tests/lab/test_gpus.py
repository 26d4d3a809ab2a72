"""Runs that reserve the same GPUs, on engines that declare some: each gets all of its own at once, in the order in which they came."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from stand_in import docker, say

from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.errors import RunNotFound, StackError
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher, observe
from swarmtrain.plan import Cargo, CodeFile, Plan, make_plan

pytestmark = pytest.mark.test_all_only("waits for several runs in a queue; the order of the queue is in tests/unit/test_swarm_turn.py")


@pytest.fixture(scope="module")
def gpus(new_lab: Callable[[str], Lab], stand_in: str) -> Lab:
    """One node with two GPUs: engines before 25.0.3 keep what reserves GPUs only where the notice board is too.

    The image comes from the registry, which all labs of these tests share.
    """
    lab = new_lab("gpus")
    lab.up(1, gpus=2, say=say)
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
    """Return a function that plans a run by its name and the GPUs that it wants."""

    def make(run: str, slots: int) -> Plan:
        runner = {
            "hosts": (f"node0 slots={slots}",),
            "swarm": {"gpu": GpuMode.reserve},
            "stop_grace": 5,
            "docker_config": {"docker_container": stand_in},
        }
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
    launcher.up(wanting("first", 1), say)
    assert holding(launcher, "first")[0][0] in ("GPU-node0-1", "GPU-node0-2")
    with pytest.raises(StackError, match="not all its NVIDIA-GPU are free: node0 has 2, 2 wanted, first has 1"):
        launcher.up(replace(wanting("probe", 2), probe=True), say)
    # One is free, and is not taken while the other is not.
    second = Deploy(gpus, wanting("second", 2))
    assert second.waits_for("node0 has 2, 2 wanted, first has 1")
    # What it waits for is not given to who comes later.
    third = Deploy(gpus, wanting("third", 1))
    assert third.waits_for("node0 has 2, 1 wanted, first has 1, run second waits for 2")
    assert launcher.runs() == ["first"]
    with pytest.raises(RunNotFound, match="waits for NVIDIA-GPU of other runs"):
        launcher.tasks("second")
    # A container that is started again has its GPU still.
    docker(gpus, "kill", docker(gpus, "ps", "-q", "--filter", "name=first_node0").strip())
    assert until(lambda: "137" in str([task.reason for task in observe.tasks(launcher._engine, "first")]))
    assert until(lambda: len(holding(launcher, "first")[0]) == 1, 20)
    assert launcher.runs() == ["first"]
    launcher.stop("first", say)
    assert second.ends()
    assert [len(ids) for ids in holding(launcher, "second")] == [2]
    # The first is stopped and has none; it comes back when it is its turn, which the third gives up.
    again = Deploy(gpus, wanting("first", 1))
    assert again.waits_for("second has 2, run third waits for 1")
    launcher.down("third", say)
    assert not third.ends()
    launcher.down("second", say)
    assert again.ends()
    assert [len(ids) for ids in holding(launcher, "first")] == [1]
    assert docker(gpus, "config", "ls", "--filter", "label=swarmtrain.queue.run", "-q") == ""
