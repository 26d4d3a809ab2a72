"""Runs that reserve the same GPUs, on engines that declare some: each gets all its GPUs at once, in order of arrival."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from swarm_helpers import print_line, run_docker

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.errors import RunNotFound, StackError
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state
from swarmtrain.plan import Plan, build_plan

pytestmark = pytest.mark.test_all_only("waits for several runs in a queue; the order of the queue is in tests/unit/test_gang_queue.py")


@pytest.fixture(scope="module")
def gpu_lab(create_lab: Callable[[str], Lab], stub_image: str) -> Lab:
    """One node with two GPUs: on engines before 25.0.3, tasks that reserve GPUs stay up only on the coordinator's node.

    The image comes from the registry, which all labs of these tests share.
    """
    lab = create_lab("gpus")
    lab.bring_up(1, gpus=2, report_progress=print_line)
    return lab


@pytest.fixture
def launcher(gpu_lab: Lab) -> Iterator[SwarmLauncher]:
    launcher = SwarmLauncher(gpu_lab.get_docker_host("node0"))
    yield launcher
    for run in {*launcher.list_runs(), *launcher.list_terminating_runs()}:
        with contextlib.suppress(RunNotFound):  # a deploy that was still waiting is gone
            launcher.tear_down_run(run, print_line)


@pytest.fixture
def plan_gpu_run(launcher: SwarmLauncher, stub_image: str) -> Callable[..., Plan]:
    """Return a function that plans a run by name and number of GPUs."""

    def make(run: str, slots: int) -> Plan:
        runner = {
            "hosts": (f"node0 slots={slots}",),
            "swarm": {"gpu": GpuMode.reserve},
            "stop_grace": 5,
            "docker_config": {"docker_container": stub_image},
        }
        cargo = Cargo((RunFile.from_content("training_code.py", b"train()\n"),))
        config = Config.model_validate({"runner": runner})
        return build_plan(config, launcher.read_inventory(config.runner), cargo, run=run)

    return make


class DeployThread(threading.Thread):
    """A deploy in the background; `messages` is its output so far."""

    def __init__(self, lab: Lab, plan: Plan) -> None:
        super().__init__(daemon=True)
        self._lab, self._plan = lab, plan
        self.messages: list[str] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            SwarmLauncher(self._lab.get_docker_host("node0")).deploy_run(self._plan, self.messages.append)
        except Exception as error:  # noqa: BLE001  # any error; the test checks it
            self.error = error

    def wait_for_success(self) -> bool:
        """Return whether the deploy ends within 60 s with the run up."""
        self.join(60)
        print_line("\n".join([*self.messages, str(self.error)]))
        return not self.is_alive() and self.error is None

    def has_reported_waiting(self, text: str) -> bool:
        """Return whether the deploy prints within 10 s that it waits, in these words."""
        return wait_until(lambda: any("waiting until all" in line and text in line for line in self.messages))


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return is_met


def list_held_gpus(launcher: SwarmLauncher, run: str) -> list[tuple[str, ...]]:
    """Return the GPUs that each node of the run has."""
    return [task.gpus for task in launcher.list_tasks(run) if task.node != "rendezvous"]


def test_runs_that_want_the_same_gpus_wait_as_a_whole_and_in_order(
    gpu_lab: Lab, launcher: SwarmLauncher, plan_gpu_run: Callable[..., Plan]
) -> None:
    launcher.deploy_run(plan_gpu_run("first", 1), print_line)
    assert list_held_gpus(launcher, "first")[0][0] in ("GPU-node0-1", "GPU-node0-2")
    with pytest.raises(StackError, match="not all of its NVIDIA-GPU are free: node0 has 2, 2 requested, first has 1"):
        launcher.deploy_run(replace(plan_gpu_run("probe", 2), is_probe=True), print_line)
    # One GPU is free, and is not taken while the other is in use.
    second = DeployThread(gpu_lab, plan_gpu_run("second", 2))
    assert second.has_reported_waiting("node0 has 2, 2 requested, first has 1")
    # The GPUs that the second run waits for are not given to a later one.
    third = DeployThread(gpu_lab, plan_gpu_run("third", 1))
    assert third.has_reported_waiting("node0 has 2, 1 requested, first has 1, run second waits for 2")
    assert launcher.list_runs() == ["first"]
    states = {overview.run: {task.state for task in overview.tasks} for overview in launcher.read_overviews()}
    assert states == {"first": {"running"}, "second": {"queued"}, "third": {"queued"}}
    with pytest.raises(RunNotFound, match="waits for NVIDIA-GPU held by other runs"):
        launcher.list_tasks("second")
    # A restarted container keeps its GPU.
    run_docker(gpu_lab, "kill", run_docker(gpu_lab, "ps", "-q", "--filter", "name=first_node0").strip())
    assert wait_until(lambda: "137" in str([task.reason for task in cluster_state.list_tasks(launcher._engine, "first")]))
    assert wait_until(lambda: len(list_held_gpus(launcher, "first")[0]) == 1, 20)
    assert launcher.list_runs() == ["first"]
    launcher.stop_run("first", print_line)
    assert second.wait_for_success()
    assert [len(ids) for ids in list_held_gpus(launcher, "second")] == [2]
    # The first run is stopped and holds no GPU. It gets one again when it is its turn: the third remove it from the queue.
    again = DeployThread(gpu_lab, plan_gpu_run("first", 1))
    assert again.has_reported_waiting("second has 2, run third waits for 1")
    launcher.tear_down_run("third", print_line)
    assert not third.wait_for_success()
    launcher.tear_down_run("second", print_line)
    assert again.wait_for_success()
    assert [len(ids) for ids in list_held_gpus(launcher, "first")] == [1]
    assert run_docker(gpu_lab, "config", "ls", "--filter", "label=swarmtrain.queue.run", "-q") == ""
