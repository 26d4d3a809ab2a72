"""The values of a cluster's page: runs, queue, and machines with the GPUs of each run, on a swarm in memory and elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from test_scheduler import Cluster

from swarmtrain import protocol
from swarmtrain.errors import EngineError, SwarmAbsentError, SwarmtrainError
from swarmtrain.launchers.base import RunOverview, TaskState
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.machines.machine_records import read_gpu_ids, record_gpus
from swarmtrain.launchers.swarm.task_states import build_task_states
from swarmtrain.protocol import Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.queueing.queue_service import SchedulerStatus
from swarmtrain.queueing.queue_state import QueueReader
from swarmtrain.view.dashboard import cluster_reader
from swarmtrain.view.dashboard.cluster_machines import SwarmState
from swarmtrain.view.dashboard.cluster_metrics import render_cluster_metrics
from swarmtrain.view.dashboard.cluster_page import ClusterPage, build_cluster_page
from swarmtrain.view.dashboard.cluster_reader import ClusterReader, StartEstimator
from swarmtrain.view.queue_table import estimate_queue_starts

STATUS = SchedulerStatus("running", "gpu-0", "registry/queue:1", "0.1.0")
LOCATION = "the swarm at fake"
GPU = "NVIDIA-GPU"


def build_overviews(cluster: Cluster) -> list[tuple[str, RunOverview]]:
    hosts = cluster_state.read_host_names(cluster.swarm)
    overviews = []
    for run in cluster_state.list_runs(cluster.swarm):
        services = cluster_state.list_services(cluster.swarm, run)
        states = build_task_states(run, services, cluster_state.list_tasks(cluster.swarm, run), hosts)
        events = tuple(cluster.events.get(run, ()))
        overviews.append((LOCATION, RunOverview(run, cluster_state.find_identity(services, run), tuple(states), events)))
    return overviews


def build_page(
    cluster: Cluster, *others: tuple[str, RunOverview], scheduler: SchedulerStatus | str | None = STATUS, problems: Sequence[str] = ()
) -> ClusterPage:
    queue, overviews = QueueReader(cluster.swarm).read_state(cluster.now), build_overviews(cluster)
    starts = estimate_queue_starts(queue, [overview for _, overview in overviews], cluster.now)
    swarm = SwarmState(LOCATION, queue, read_gpu_ids(cluster.swarm), starts)
    return build_cluster_page([*overviews, *others], swarm, scheduler, problems, cluster.now)


def assign_gpus(cluster: Cluster, run: str, number: int) -> None:
    """Let Swarm assign the GPU with this number of its machine to each running task of the nodes of `run`."""
    for task in cluster.swarm.tasks:
        if task["ServiceName"].startswith(f"{run}_node"):
            gpu = f"GPU-{int(task['NodeID'])}-{number}"
            task["GenericResources"] = [{"NamedResourceSpec": {"Kind": GPU, "Value": gpu}}]


def test_runs_the_queue_and_who_holds_which_gpu() -> None:
    cluster = Cluster(2)
    cluster.submit(
        "first",
        nodes=1,
        swarm={"gpu": "reserve"},
        hosts=["gpu-0 slots=1"],
        docker_config={"docker_container": "registry/image:1", "cpus": 3},
    )
    cluster.submit("second", nodes=1, swarm={"gpu": "reserve"}, hosts=["gpu-1 slots=2"])
    cluster.submit("third", nodes=2, swarm={"gpu": "reserve"}, hosts=["gpu-0 slots=2", "gpu-1 slots=2"])
    cluster.settle()
    assign_gpus(cluster, "first", 1)
    cluster.events["first"] = [Event(protocol.EVENT_PROGRESS, {"step": 20, "steps": 80, "loss": 2.5, "eta_seconds": 60.0}, cluster.now)]
    page = build_page(cluster)
    assert [(row.run, row.state, row.step, row.steps, row.loss) for row in page.runs] == [
        ("first", "training", 20, 80, 2.5),
        ("second", "starting", None, None, None),
        ("third", "queued", None, None, None),
    ]
    assert page.queue
    assert [(row.run, row.priority_class, row.state, row.resources_per_node) for row in page.queue.runs] == [
        ("first", "normal", "running", {GPU: 1.0, "cores": 3.0}),
        ("second", "normal", "running", {GPU: 2.0, "cores": 8.0}),
        ("third", "normal", "waiting", {GPU: 2.0, "cores": 8.0}),
    ]
    assert "allocated to first" in page.queue.runs[2].reason
    assert [row.estimate for row in page.queue.runs] == [None, None, None], "second has no known end"
    first, second = page.machines
    assert (first.name, first.state, first.gpu_ids, first.gpus_allocated) == ("gpu-0", "ready", ("GPU-0-0", "GPU-0-1"), 1.0)
    assert [(allocation.user, allocation.gpus, allocation.gpu_numbers, allocation.cores) for allocation in first.allocations] == [
        ("first", 1.0, (1,), 3.0)
    ]
    assert (first.cores, first.cores_allocated) == (8.0, 3.0)
    assert [(allocation.user, allocation.gpu_numbers) for allocation in second.allocations] == [("second", (0, 1))], (
        "a run with all GPUs has each"
    )


def test_gpus_with_unknown_numbers_have_none() -> None:
    """A machine that declares a number of GPUs instead of their ids: Swarm does not tell them apart."""
    cluster = Cluster(1)
    cluster.swarm.nodes[0]["Description"]["Resources"]["GenericResources"] = [{"DiscreteResourceSpec": {"Kind": GPU, "Value": 4}}]
    cluster.submit("first", nodes=1, swarm={"gpu": "reserve"}, hosts=["gpu-0 slots=2"])
    cluster.settle()
    (machine,) = build_page(cluster).machines
    assert (machine.gpu_ids, machine.gpus_allocated) == (("",) * 4, 2.0)
    assert [(allocation.gpus, allocation.gpu_numbers) for allocation in machine.allocations] == [(2.0, ())]


def test_visible_gpus_by_number_of_a_probed_machine() -> None:
    cluster = Cluster(1)
    cluster.swarm.nodes[0]["Description"]["Resources"]["GenericResources"] = []
    record_gpus(cluster.swarm, {cluster.swarm.nodes[0]["ID"]: ["GPU-a", "GPU-b", "GPU-c"]})
    cluster.submit("first", nodes=1, swarm={"gpu": "visible"}, hosts=["gpu-0 slots=2,0"])
    cluster.settle()
    (machine,) = build_page(cluster).machines
    assert (machine.gpu_ids, machine.gpus_allocated) == (("GPU-a", "GPU-b", "GPU-c"), 2.0)
    assert [(allocation.gpus, allocation.gpu_numbers) for allocation in machine.allocations] == [(2.0, (0, 2))]


def test_runs_that_share_are_counted_once() -> None:
    cluster = Cluster(1)
    for run in ("first", "second"):
        cluster.submit(run, nodes=1, share=True, swarm={"gpu": "visible"})
    cluster.settle()
    (machine,) = build_page(cluster).machines
    assert (machine.gpus_allocated, machine.cores_allocated) == (2.0, 8.0)
    assert [(allocation.user, allocation.gpu_numbers, allocation.is_shared) for allocation in machine.allocations] == [
        ("first", (0, 1), True),
        ("second", (0, 1), True),
    ]


def test_without_a_scheduler_the_page_says_so() -> None:
    cluster = Cluster(1)
    page = build_page(cluster, scheduler="the queue's scheduler: there is none in this swarm")
    assert (page.queue, page.queue_note, len(page.machines)) == (None, "the queue's scheduler: there is none in this swarm", 1)
    assert "queue_runs" not in render_cluster_metrics(page, (), cluster.now, is_reachable=True)


def test_without_a_scheduler_the_page_shows_the_runs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1)
    monkeypatch.setattr(cluster_reader, "DockerEngine", lambda: cluster.swarm)
    reader = ClusterReader()
    state, scheduler = reader._read_swarm(LOCATION, [])
    assert isinstance(scheduler, str), "the queue is empty"
    cluster.submit("first", nodes=1)
    state, scheduler = reader._read_swarm(LOCATION, [])
    assert scheduler is None
    page = build_cluster_page([], state, scheduler, (), cluster.now)
    page_data = page.to_page_data()
    assert [(run["run"], run["state"], run["estimate"]) for run in page_data["queue"]] == [("first", "waiting", None)]
    assert page_data["scheduler"] == "there is no scheduler: runs that wait stay waiting; start one with: swarmtrain queue up"
    assert "swarmtrain_scheduler_up 0\n" in render_cluster_metrics(page, (), cluster.now, is_reachable=True)


class AbsentSwarmLauncher:
    """The launcher of Swarm on an engine without a swarm."""

    location = "the swarm at fake"


@pytest.mark.parametrize("other", [None, EngineError("no answer")])
def test_an_engine_without_a_swarm_has_a_page(other: EngineError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    absence = SwarmAbsentError("this engine is not part of a swarm", status=503)

    def discover(launchers: dict[str, object]) -> tuple[list[object], list[SwarmtrainError]]:
        launchers["swarm"] = AbsentSwarmLauncher()
        return [], [absence, *([other] if other else [])]

    def read_swarm(*_: object) -> None:
        raise absence

    monkeypatch.setattr(cluster_reader, "discover_overviews", discover)
    monkeypatch.setattr(ClusterReader, "_read_swarm", read_swarm)
    if other:
        with pytest.raises(EngineError, match="no answer"):
            ClusterReader().read_page()
    else:
        page = ClusterReader().read_page()
        assert (page.runs, page.machines, page.problems) == ((), (), ())
        assert page.queue_note == "this engine is not part of a swarm"


def test_the_launcher_of_a_run_is_that_of_the_newest_page(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunOverview("sweep", RunIdentity("aaaaaaaaaaaa"), (), ())
    launchers = [AbsentSwarmLauncher(), AbsentSwarmLauncher()]
    pages = iter([([(launchers[0], run)], []), ([(launchers[1], run)], []), ([], [])])
    monkeypatch.setattr(cluster_reader, "discover_overviews", lambda _: next(pages))
    reader = ClusterReader()
    found = []
    for _ in range(3):
        reader.read_page()
        found.append(reader.find_launcher(run.identity.id))
    assert found == [*launchers, None]


def test_runs_of_other_launchers_are_on_the_hosts_that_their_tasks_report() -> None:
    cluster = Cluster(1)
    usage = Event(protocol.EVENT_USAGE, {"nodes": {"node0": {"gpus": [{}, {}]}}}, cluster.now - 1)
    tasks = (TaskState("node0", "alpha", "running"), TaskState("node1", "beta", "complete"), TaskState("rendezvous", "alpha", "running"))
    local = RunOverview("sweep", RunIdentity("aaaaaaaaaaaa", "ben"), tasks, (usage,))
    page = build_page(cluster, ("its hosts", local))
    machine = page.machines[1]
    assert (machine.name, machine.location, machine.state, machine.gpu_ids, machine.gpus_allocated) == ("alpha", "its hosts", "", (), 2.0)
    assert [asdict(allocation)["user"] for allocation in machine.allocations] == ["sweep"]
    without_swarm = build_cluster_page([("its hosts", local)], None, "this machine does not reach a swarm", (), cluster.now)
    assert [machine.name for machine in without_swarm.machines] == ["alpha"]
    assert without_swarm.queue is None


def test_a_machine_of_the_swarm_with_a_run_of_another_launcher_has_each_metric_once() -> None:
    cluster = Cluster(1)
    local = RunOverview("sweep", RunIdentity("aaaaaaaaaaaa", "ben"), (TaskState("node0", "gpu-0", "running"),), ())
    page = build_page(cluster, ("its hosts", local))
    assert [machine.name for machine in page.machines] == ["gpu-0", "gpu-0, its hosts"]
    text = render_cluster_metrics(page, (), cluster.now, is_reachable=True)
    assert sorted(line for line in text.splitlines() if line.startswith("swarmtrain_machine_gpus_allocated")) == [
        'swarmtrain_machine_gpus_allocated{host="gpu-0"} 0',
        'swarmtrain_machine_gpus_allocated{host="gpu-0, its hosts"} 0',
    ]


def test_runs_and_machines_with_the_same_name_are_told_apart_by_their_ids() -> None:
    cluster = Cluster(2)
    cluster.swarm.nodes[1]["Description"]["Hostname"] = "gpu-0"
    other = RunOverview("first", RunIdentity("aaaaaaaaaaaa"), (), ())
    cluster.submit("first", nodes=1)
    page = build_page(cluster, ("its hosts", other))
    assert sorted(page.list_keys()) == ["aaaaaaaaaaaa", "id-first"]
    assert [machine.name for machine in page.machines] == [node["ID"] for node in cluster.swarm.nodes]


def test_a_stack_whose_name_would_leave_the_folder_of_records_is_not_listed() -> None:
    cluster = Cluster(1)
    cluster.submit("first", nodes=1)
    cluster.submit("second", nodes=1)
    for service in cluster.swarm.objects["services"].values():
        if service["Spec"]["Labels"][protocol.LABEL_STACK] == "second":
            service["Spec"]["Labels"][protocol.LABEL_STACK] = "../second"
    assert cluster_state.list_runs(cluster.swarm) == ["first"]
    assert {run for run, _ in cluster_state.list_services_of_runs(cluster.swarm)} == {"first"}


def test_a_page_stays_equal_while_nothing_changes() -> None:
    cluster = Cluster(2)
    cluster.submit("first", nodes=1)
    cluster.submit("second", nodes=2)
    cluster.settle()
    before = build_page(cluster).to_page_data()
    cluster.now += 30
    assert build_page(cluster).to_page_data() == before


def test_starts_are_estimated_again_after_a_multiple_of_the_time_that_it_took() -> None:
    cluster = Cluster(1)
    cluster.submit("first", nodes=1, time_limit="1h")
    cluster.settle()
    cluster.submit("second", nodes=1, time_limit="1h")
    cluster.settle()
    reader = QueueReader(cluster.swarm)
    clock = iter([0.0, 2.0, 41.0, 42.0, 43.0])  # the first estimate takes 2 s
    estimator = StartEstimator(lambda: next(clock))
    assert estimator.estimate(reader.read_state(cluster.now), ())["second"] == pytest.approx(3600, abs=5)
    cluster.submit("third", nodes=1, time_limit="1h")
    cluster.settle()
    known = [list(estimator.estimate(reader.read_state(cluster.now), ())) for _ in range(2)]
    assert known == [["second"], ["second", "third"]], "at 41 s the first estimate is used, at 42 s there is another"


def test_the_queue_and_the_machines_as_metrics() -> None:
    cluster = Cluster(2)
    cluster.submit("first", nodes=2)
    cluster.settle()
    cluster.submit("urgent", nodes=1, priority="high")
    cluster.settle(seconds=10)
    text = render_cluster_metrics(build_page(cluster), (), cluster.now + 5, is_reachable=True)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in {
        "cluster_reachable": "1",
        "scheduler_up": "1",
        'queue_runs{class="high",state="running"}': "1",
        'queue_runs{class="normal",state="preempted"}': "1",
        'queue_runs{class="normal",state="waiting"}': "0",
        'queue_runs{class="low",state="waiting"}': "0",
        'machine_available{host="gpu-0"}': "1",
        'machine_gpus{host="gpu-1"}': "2",
        'machine_cores{host="gpu-0"}': "8",
    }.items():
        assert samples[f"swarmtrain_{name}"] == value, name
    names = re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE)
    assert len(names) == len(set(names)) == text.count("# HELP ")
    incomplete = render_cluster_metrics(build_page(cluster, problems=["no answer"]), [("lost", None)], cluster.now, is_reachable=True)
    assert "swarmtrain_cluster_reachable 0\n" in incomplete
    assert 'swarmtrain_reachable{run="lost"} 0\n' in incomplete
