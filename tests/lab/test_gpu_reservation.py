"""Runs that reserve the same GPUs, on engines that declare some, without a scheduler: each gets all its GPUs, or is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from swarm_helpers import print_line, run_docker

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.errors import ResourcesReserved
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state
from swarmtrain.operations import runs
from swarmtrain.planning.plan import Plan, build_plan

pytestmark = pytest.mark.test_all_only("deploys several runs; reservations on a swarm in memory are in tests/queueing/test_reservation.py")


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
    """`swarmtrain deploy --wait` or, without `wait`, `swarmtrain deploy` in the background."""

    def __init__(self, lab: Lab, plan: Plan, *, wait: bool) -> None:
        super().__init__(daemon=True)
        self._lab, self._plan, self._wait = lab, plan, wait
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            runs.deploy_run(SwarmLauncher(self._lab.get_docker_host("node0")), self._plan, assume_yes=True, wait=self._wait)
        except Exception as error:  # noqa: BLE001  # any error; the test checks it
            self.error = error


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return is_met


def count_gpus(launcher: SwarmLauncher, run: str) -> int:
    """Return the number of GPUs that are assigned to the nodes of the run."""
    return sum(len(task.gpus) for task in launcher.list_tasks(run) if task.node != "rendezvous")


def test_a_run_gets_all_its_gpus_or_is_refused(gpu_lab: Lab, launcher: SwarmLauncher, plan_gpu_run: Callable[..., Plan]) -> None:
    launcher.deploy_run(plan_gpu_run("first", 1), print_line)
    with pytest.raises(ResourcesReserved, match="NVIDIA-GPU are free: node0 has 2, 2 requested, 1 reserved by first"):
        launcher.deploy_run(plan_gpu_run("second", 2), print_line)
    assert launcher.list_runs() == ["first"]
    assert launcher.list_terminating_runs() == [], "a refused deploy leaves nothing"
    # A restarted container keeps its GPU.
    run_docker(gpu_lab, "kill", run_docker(gpu_lab, "ps", "-q", "--filter", "name=first_node0").strip())
    assert wait_until(lambda: "137" in str([task.reason for task in cluster_state.list_tasks(launcher._engine, "first")]))
    assert wait_until(lambda: count_gpus(launcher, "first") == 1, 20)
    second = DeployThread(gpu_lab, plan_gpu_run("second", 2), wait=True)
    second.join(8)
    assert second.is_alive(), second.error
    assert launcher.list_runs() == ["first"]
    # A waiting deploy has reserved nothing: the free GPU is for the next one.
    launcher.deploy_run(plan_gpu_run("third", 1), print_line)
    launcher.tear_down_run("third", print_line)
    launcher.stop_run("first", print_line)
    second.join(60)
    assert not second.is_alive()
    assert second.error is None
    assert count_gpus(launcher, "second") == 2
    with pytest.raises(ResourcesReserved, match="2 reserved by second"):
        launcher.deploy_run(plan_gpu_run("first", 1), print_line)


def test_of_two_concurrent_deploys_one_gets_the_gpus(gpu_lab: Lab, launcher: SwarmLauncher, plan_gpu_run: Callable[..., Plan]) -> None:
    deploys = {name: DeployThread(gpu_lab, plan_gpu_run(name, 2), wait=False) for name in ("left", "right")}
    for deploy in deploys.values():
        deploy.join(90)
    refused = [name for name, deploy in deploys.items() if isinstance(deploy.error, ResourcesReserved)]
    assert [deploy.error for name, deploy in deploys.items() if name not in refused] == [None]
    (run,) = launcher.list_runs()
    assert run not in refused
    assert count_gpus(launcher, run) == 2
    assert run_docker(gpu_lab, "config", "ls", "--filter", "name=swarmtrain-reservations", "-q") == ""
