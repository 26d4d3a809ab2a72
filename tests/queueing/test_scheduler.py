"""The scheduler and the submission on a swarm in memory: what they write, and that a killed scheduler loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fake_swarm import FakeSwarm, Killed

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import PlanError, StackError
from swarmtrain.images.pinning import PinnedImage
from swarmtrain.launchers.swarm import cluster_state, deployed_run
from swarmtrain.launchers.swarm.queue import submission
from swarmtrain.launchers.swarm.queue.policy_store import store_policy
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry, find_queue_entry
from swarmtrain.launchers.swarm.reconcile import ReconcileStep, reconcile
from swarmtrain.launchers.swarm.resources.reservation import ResourceRequest
from swarmtrain.launchers.swarm.service_specs import add_labels, build_stack_specs
from swarmtrain.launchers.swarm.stack_deployment import deploy_stack
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.protocol import EVENT_CHECKPOINT, EVENT_PROGRESS, Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.queue_labels import ENV_QUEUE_STOP, LABEL_QUEUE_CHANGED, LABEL_QUEUE_LOST, LABEL_QUEUE_STOP, QueueStop
from swarmtrain.queueing.queue_changes import move_run
from swarmtrain.queueing.queue_state import QueueReader
from swarmtrain.queueing.scheduler import LeadershipLost, Scheduler
from swarmtrain.render.stack_document import render_stack

_CARGO = Cargo((RunFile.from_content("training_code.py", b"train()\n"),), (RunFile.from_content("TOKEN", b"hidden"),))


class Cluster:
    """A swarm in memory, with a clock, a scheduler, and the commands of a user."""

    def __init__(self, machines: int = 4) -> None:
        self.swarm: Any = FakeSwarm(machines)
        self.now = 1000.0
        self.events: dict[str, list[Event]] = {}
        """The last events in the log of each run."""
        self.restart_scheduler()

    def restart_scheduler(self) -> None:
        self.scheduler = Scheduler(
            self.swarm, lambda _line: None, get_time=lambda: self.now, read_events=lambda _engine, member: self.events.get(member.run, [])
        )

    def plan(self, run: str, topology: Mapping[str, int] | None = None, notify: Mapping[str, Any] | None = None, **runner: Any) -> Plan:
        settings = {"nodes": 1, "docker_config": {"docker_container": "registry/image:1"}, **runner}
        sections = {"runner": settings, "notify": notify or {}, **({"topology": topology} if topology else {})}
        config = Config.model_validate_json(json.dumps(sections))
        services = cluster_state.list_services(self.swarm, run)
        entry = find_queue_entry(services, run)
        placement = Placement(dict(entry.machines)) if entry else FRESH_PLACEMENT
        return build_plan(config, cluster_state.read_inventory(self.swarm), _CARGO, run=run, placement=placement)

    def submit(self, run: str, **runner: Any) -> list[ReconcileStep]:
        """Deploy a run as the launcher does, and return the steps."""
        plan = self.plan(run, **runner)
        stack = render_stack(plan)
        pinned = PinnedImage("registry/image:1@sha256:00", (("amd64", "linux"),))
        specs = build_stack_specs(stack, {service["image"]: pinned for service in stack.document["services"].values()})
        specs = add_labels(specs, RunIdentity(f"id-{run}", "anna", "desk", 1.0).labels)
        taken: list[ReconcileStep] = []

        def plan_steps() -> list[ReconcileStep]:
            existing = cluster_state.read_stack_state(self.swarm, run)
            inventory = cluster_state.read_inventory(self.swarm)
            taken[:] = reconcile(submission.queue_specs(specs, existing, None, plan, inventory), existing, None)
            submission.write_entry_first(self.swarm, run, taken)
            return list(taken)

        deploy_stack(
            self.swarm,
            ResourceRequest(run),
            plan_steps,
            lambda _line: None,
            complete_submission=lambda: submission.complete_entry(self.swarm, run, lambda _line: None),
        )
        return taken

    def store_policy(self, text: str) -> None:
        store_policy(self.swarm, text, source="policy.yml")

    def settle(self, seconds: float = 0.0, rounds: int = 12) -> None:
        """Let the scheduler and Swarm work until nothing changes any more."""
        self.now += seconds
        for _ in range(rounds):
            self.scheduler.run_round()
            self.swarm.advance()
            self.check_no_double_allocation()

    def read_entry(self, run: str) -> QueueEntry:
        entry = find_queue_entry(cluster_state.list_services(self.swarm, run), run)
        assert entry is not None
        return entry

    @property
    def running(self) -> Mapping[str, int]:
        """Number of running nodes by run."""
        return {run: len(machines) for run, machines in self.swarm.count_running_nodes().items()}

    def check_no_double_allocation(self) -> None:
        """Each machine has 2 GPUs, which the tests' runs reserve one or two at a time. A container that saves still uses them."""
        used: dict[str, int] = {}
        down = {node["ID"] for node in self.swarm.nodes if node["Status"]["State"] == "down"}
        for task in self.swarm.tasks:
            if task["Status"]["State"] == "running" and task["NodeID"] not in down:
                for item in task["Spec"].get("Resources", {}).get("Reservations", {}).get("GenericResources", []):
                    used[task["NodeID"]] = used.get(task["NodeID"], 0) + item["DiscreteResourceSpec"]["Value"]
        assert all(count <= 2 for count in used.values()), used


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_submitted_run_has_no_container_until_it_is_admitted(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=2)
    cluster.swarm.advance()
    assert cluster.running == {}
    assert cluster.read_entry("demo").state == "waiting"
    cluster.settle()
    assert cluster.running == {"demo": 2}
    assert sorted(cluster.read_entry("demo").machines) == ["node0", "node1"]


def test_an_unchanged_deploy_changes_nothing_in_any_state(cluster: Cluster) -> None:
    cluster.submit("first", nodes=3)
    cluster.submit("second", nodes=3)
    assert cluster.submit("second", nodes=3) == []
    cluster.settle()
    assert cluster.running == {"first": 3}
    assert cluster.submit("first", nodes=3) == []
    assert cluster.submit("second", nodes=3) == []


def test_runs_start_on_machines_that_are_free_not_on_those_of_their_plan(cluster: Cluster) -> None:
    """Both plans name the first two machines, with their slots. The second run gets the others, with theirs."""
    cluster.submit("first", nodes=2)
    cluster.submit("second", nodes=2, hosts=["gpu-0 slots=2", "gpu-1 slots=2", "gpu-2 slots=1", "gpu-3 slots=1"])
    cluster.settle()
    assert cluster.running == {"first": 2, "second": 2}
    services = cluster_state.list_services(cluster.swarm, "second")
    nodes = [service for service in services if service.is_node]
    assert [service.pinned_machine for service in nodes] == ["gpu-2", "gpu-3"]
    assert [service.spec["Labels"]["swarmtrain.slots"] for service in nodes] == ["1", "1"]
    assert all("SWARMTRAIN_SLOTS=1" in service.spec["TaskTemplate"]["ContainerSpec"]["Env"] for service in nodes)
    cluster.check_no_double_allocation()


def test_the_next_run_starts_when_one_has_ended(cluster: Cluster) -> None:
    cluster.submit("first", nodes=4)
    cluster.submit("second", nodes=4)
    cluster.settle()
    assert cluster.read_entry("second").reason == "0 of 4 nodes free; allocated to first"
    cluster.swarm.complete_run("first")
    cluster.settle()
    assert cluster.running == {"second": 4}


def test_a_run_whose_coordinator_is_lost_after_the_outcome_has_no_machines(cluster: Cluster) -> None:
    """Its nodes have ended, and Swarm starts the coordinator again."""
    cluster.submit("first", nodes=4)
    cluster.submit("second", nodes=4)
    cluster.settle()
    cluster.swarm.complete_run("first")
    coordinator = next(task for task in cluster.swarm.tasks if task["ServiceName"] == "first_rendezvous")
    coordinator["Status"], coordinator["DesiredState"] = {"State": "running"}, "running"
    cluster.settle()
    assert cluster.running == {"second": 4}


def test_a_node_that_swarm_starts_again_after_the_end_of_its_run_is_stopped(cluster: Cluster) -> None:
    """Its machine was lost before it had exited. When the machine is back, the node would wait for the coordinator, which has exited."""
    cluster.submit("first", nodes=4)
    cluster.submit("second", nodes=4)
    cluster.settle()
    cluster.swarm.complete_run("first")
    for name, state in (("first_node0", "running"), ("first_node1", "failed")):
        task = next(task for task in cluster.swarm.tasks if task["ServiceName"] == name)
        task["Status"], task["DesiredState"] = {"State": state}, "running"
    cluster.settle()
    assert cluster.running == {"first": 2}, "for a moment, a node may still be about to exit"
    cluster.settle(seconds=31)
    assert cluster.running == {"second": 4}
    cluster.submit("first", nodes=4)
    cluster.swarm.complete_run("second")
    cluster.settle()
    assert cluster.running == {"first": 4}


def test_a_preempted_run_comes_back_by_itself(cluster: Cluster) -> None:
    cluster.submit("low", nodes=4, priority="low")
    cluster.settle()
    cluster.submit("urgent", nodes=2, priority="high")
    cluster.settle()
    assert cluster.running == {"urgent": 2}
    assert cluster.read_entry("low").state == "waiting"
    cluster.swarm.complete_run("urgent")
    cluster.settle()
    assert cluster.running == {"low": 4}


def test_a_victim_that_does_not_save_is_reported_with_the_steps_that_it_lost(cluster: Cluster) -> None:
    for run, saved in (("good", 40), ("bad", 25)):
        cluster.submit(run, nodes=2, priority="low")
        cluster.events[run] = [
            Event(EVENT_CHECKPOINT, {"step": 20}),
            Event(EVENT_PROGRESS, {"step": 40, "loss": 1.0}),
            Event(EVENT_CHECKPOINT, {"step": saved}),
        ]
    cluster.settle()
    cluster.submit("urgent", nodes=4, priority="high")
    cluster.settle()
    assert cluster.running == {"urgent": 4}
    assert {run: cluster.read_entry(run).lost_steps for run in ("good", "bad")} == {"good": 0, "bad": 15}
    assert not any(cluster.read_entry(run).is_saving for run in ("good", "bad"))


def test_an_elastic_run_shrinks_and_grows_again_and_its_other_nodes_keep_running(cluster: Cluster) -> None:
    cluster.submit("elastic", nodes=4, min_nodes=1)
    cluster.settle()
    before = {task["ID"] for task in cluster.swarm.tasks if task["Status"]["State"] == "running"}
    cluster.submit("urgent", nodes=2, priority="high")
    cluster.settle()
    assert cluster.running == {"elastic": 2, "urgent": 2}
    kept = {task["ID"] for task in cluster.swarm.tasks if task["Status"]["State"] == "running"} & before
    assert len(kept) == 3, "two nodes and the coordinator"
    cluster.swarm.complete_run("urgent")
    cluster.settle()
    assert cluster.running == {"elastic": 4}
    assert kept <= {task["ID"] for task in cluster.swarm.tasks if task["Status"]["State"] == "running"}


def test_another_priority_restarts_nothing(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=2)
    cluster.settle()
    steps = cluster.submit("demo", nodes=2, priority="high", time_limit="2h")
    assert [(step.name, step.restarts) for step in steps] == [("demo_rendezvous", False)]
    services = cluster_state.list_services(cluster.swarm, "demo")
    runner = deployed_run.read_deployment(cluster.swarm, services, "demo")[0].runner
    assert (runner.priority, runner.time_limit) == ("high", 7200.0)


def test_a_drained_machine_is_replaced(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=2)
    cluster.settle()
    lost = cluster.swarm.count_running_nodes()["demo"][0]
    next(node for node in cluster.swarm.nodes if node["ID"] == lost)["Spec"]["Availability"] = "drain"
    cluster.settle()
    assert cluster.running == {"demo": 2}
    assert lost not in cluster.swarm.count_running_nodes()["demo"]


def test_time_limits_stop_before_the_limit_and_requeue(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=1, time_limit=1000, stop_grace=90)
    cluster.submit("other", nodes=1, time_limit=1000, stop_grace=90, on_time_limit="requeue")
    cluster.settle()
    cluster.settle(seconds=905)
    assert cluster.running == {"demo": 1, "other": 1}
    position = cluster.read_entry("other").position
    cluster.settle(seconds=10)
    assert cluster.running == {"other": 1}, "it was queued again, and the machines are free"
    entry = cluster.read_entry("demo")
    assert (entry.state, entry.reason) == ("stopped", "reached its time limit of 16m40s")
    assert cluster.read_entry("other").position > position
    cluster.settle(seconds=900)
    assert cluster.running == {"other": 1}


def _read_coordinator_start(cluster: Cluster, run: str) -> tuple[int, QueueStop | None]:
    """Return how often the coordinator was restarted, and the stop that it finds in its environment when it starts now."""
    coordinator = cluster_state.find_coordinator(cluster_state.list_services(cluster.swarm, run), run)
    assert coordinator
    labels = coordinator.spec["Labels"]
    variable = " ".join(labels.get(name, "") for name in (LABEL_QUEUE_CHANGED, LABEL_QUEUE_LOST, LABEL_QUEUE_STOP))
    return coordinator.spec["TaskTemplate"].get("ForceUpdate", 0), QueueStop.from_env({ENV_QUEUE_STOP: variable})


@pytest.mark.parametrize("is_notified", [True, False])
def test_a_coordinator_that_sends_notifications_is_restarted_once_after_a_preemption(cluster: Cluster, *, is_notified: bool) -> None:
    """It reads the preemption from the labels when it starts. Without notifications it keeps its state, and is not restarted."""
    cluster.submit("low", nodes=4, priority="low", notify={"ci": {"secret": "secret"}} if is_notified else None)
    cluster.settle()
    first_start, nothing = _read_coordinator_start(cluster, "low")
    assert nothing is None
    cluster.submit("high", nodes=2, priority="high")
    cluster.settle(seconds=60)
    assert cluster.running == {"high": 2}
    count, preemption = _read_coordinator_start(cluster, "low")
    assert count == first_start + int(is_notified)
    assert preemption
    assert preemption.reason == "preempted: high of anna has a higher priority"
    assert preemption.resumes
    assert preemption.time == 1060.0
    cluster.settle(seconds=60)
    assert _read_coordinator_start(cluster, "low") == (count, preemption)

    cluster.swarm.complete_run("high")
    cluster.settle(seconds=60)
    assert cluster.running == {"low": 4}
    assert _read_coordinator_start(cluster, "low") == (count, None)


@pytest.mark.parametrize("cause", ["time limit", "No such image", "stopped by a user"])
def test_a_stop_by_the_scheduler_is_notified_and_one_by_a_user_is_not(cluster: Cluster, cause: str) -> None:
    cluster.submit("demo", nodes=1, time_limit=1000, stop_grace=90, notify={"ci": {"secret": "secret"}})
    cluster.settle()
    first_start, _ = _read_coordinator_start(cluster, "demo")
    match cause:
        case "time limit":
            cluster.settle(seconds=915)
        case "No such image":
            _reject_tasks(cluster, "No such image: registry/image:1", times=2)
        case _:
            submission.record_stop(cluster.swarm, "demo", cause)
    cluster.settle()
    entry = cluster.read_entry("demo")
    assert entry.state == "stopped"
    assert cause in entry.reason
    count, stop = _read_coordinator_start(cluster, "demo")
    if cause == "stopped by a user":
        assert (count, stop) == (first_start, None)
    else:
        assert count == first_start + 1
        assert stop == QueueStop(entry.changed, 0, resumes=False, reason=entry.reason)


def test_time_before_a_preemption_counts_against_the_limit(cluster: Cluster) -> None:
    cluster.submit("low", nodes=4, priority="low", time_limit=1000, stop_grace=10)
    cluster.settle()
    cluster.submit("urgent", nodes=4, priority="high")
    cluster.settle(seconds=600)
    assert cluster.read_entry("low").trained_seconds == 600
    cluster.swarm.complete_run("urgent")
    cluster.settle(seconds=5000)
    assert cluster.running == {"low": 4}
    cluster.settle(seconds=395)
    assert cluster.read_entry("low").state == "stopped"


def test_a_stopped_run_stays_stopped_until_it_is_deployed(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=2)
    cluster.settle()
    submission.record_stop(cluster.swarm, "demo", "stopped by a user")
    cluster.settle()
    assert cluster.running == {}
    cluster.submit("demo", nodes=2)
    cluster.settle()
    assert cluster.running == {"demo": 2}


def test_a_run_that_cannot_start_does_not_hold_its_machines(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=2)
    cluster.settle()
    _reject_tasks(cluster, "No such image: registry/image:1", times=2)
    cluster.settle()
    entry = cluster.read_entry("demo")
    assert entry.state == "stopped"
    assert "No such image" in entry.reason


def test_a_machine_that_a_new_network_reaches_late_gets_more_time(cluster: Cluster) -> None:
    """Swarm reports the same if the addresses of the network are exhausted, so in the end the run gives its machines up."""
    cluster.submit("demo", nodes=2)
    cluster.settle()
    reason = "node is missing network attachments, ip addresses may be exhausted"
    _reject_tasks(cluster, reason, times=8)
    cluster.settle(seconds=80)
    assert cluster.running == {"demo": 2}
    _reject_tasks(cluster, reason, times=5)
    cluster.settle(seconds=20)
    entry = cluster.read_entry("demo")
    assert entry.state == "stopped"
    assert "set runner.swarm.subnet to a larger one" in entry.reason


def _reject_tasks(cluster: Cluster, reason: str, times: int) -> None:
    for _ in range(times):
        cluster.swarm.advance()
        for task in cluster.swarm.tasks:
            if task["Status"]["State"] == "running":
                task["Status"] = {"State": "rejected", "Err": reason}


_FOUR_RANKS = {"model_parallel_size": 4, "global_batch_size": 8, "micro_batch_size": 1}


def test_a_run_starts_with_the_number_of_nodes_that_fits_its_parallel_sizes(cluster: Cluster) -> None:
    """A replica needs 4 ranks, so two nodes of 2 GPUs. Three machines are free."""
    cluster.submit("first", nodes=1)
    cluster.settle()
    cluster.submit("demo", nodes=4, min_nodes=1, topology=_FOUR_RANKS)
    cluster.settle()
    assert cluster.running == {"first": 1, "demo": 2}


def test_a_run_that_no_plan_fits_waits_and_blocks_nobody(cluster: Cluster) -> None:
    cluster.submit("first", nodes=3)
    cluster.settle()
    cluster.submit("demo", nodes=4, min_nodes=1, topology=_FOUR_RANKS)
    cluster.submit("next", nodes=1)
    cluster.settle()
    assert cluster.running == {"first": 3, "next": 1}
    assert cluster.read_entry("demo").state == "waiting"
    cluster.swarm.complete_run("first")
    cluster.settle()
    assert cluster.running == {"next": 1, "demo": 2}


def test_waiting_runs_can_be_moved(cluster: Cluster) -> None:
    cluster.submit("first", nodes=4)
    cluster.settle()
    for run in ("a", "b", "c"):
        cluster.submit(run, nodes=4)
    move_run(cluster.swarm, QueueReader(cluster.swarm).read_state(cluster.now), "c", 1, print)
    cluster.swarm.complete_run("first")
    cluster.settle()
    assert cluster.running == {"c": 4}
    with pytest.raises(StackError, match="does not wait: it is admitted"):
        move_run(cluster.swarm, QueueReader(cluster.swarm).read_state(cluster.now), "c", 1, print)


def test_a_move_never_undoes_an_admission(cluster: Cluster) -> None:
    """The scheduler admits the run after the command has read the queue."""
    cluster.submit("demo", nodes=1)
    state = QueueReader(cluster.swarm).read_state(cluster.now)
    cluster.settle()
    with pytest.raises(StackError, match="does not wait: it is admitted"):
        move_run(cluster.swarm, state, "demo", 1, print)
    cluster.settle()
    assert cluster.running == {"demo": 1}


def _claim_gpus(count: int) -> dict[str, Any]:
    return {"hosts": [f"gpu-{number} slots={count}" for number in range(4)], "swarm": {"gpu": "reserve"}}


def test_a_deploy_that_changes_what_a_run_needs_makes_it_wait_in_its_old_position(cluster: Cluster) -> None:
    """All its nodes stop, and start together when all of them fit."""
    cluster.submit("demo", nodes=4, **_claim_gpus(1))
    cluster.submit("other", nodes=1, **_claim_gpus(1))
    cluster.settle()
    assert cluster.running == {"demo": 4, "other": 1}
    position = cluster.read_entry("demo").position
    cluster.submit("demo", nodes=4, **_claim_gpus(2))
    cluster.submit("late", nodes=4, **_claim_gpus(2))
    cluster.settle()
    assert cluster.running == {"other": 1}
    assert cluster.read_entry("demo").position == position
    cluster.swarm.complete_run("other")
    cluster.settle()
    assert cluster.running == {"demo": 4}
    cluster.check_no_double_allocation()


def test_an_elastic_run_keeps_the_nodes_whose_resources_a_deploy_does_not_change(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=4, min_nodes=2, **_claim_gpus(1))
    cluster.settle()
    hosts = [f"gpu-{number} slots={2 if number else 1}" for number in range(4)]
    cluster.submit("demo", nodes=4, min_nodes=1, hosts=hosts, swarm={"gpu": "reserve"})
    entry = cluster.read_entry("demo")
    assert (entry.state, len(entry.machines)) == ("admitted", 1)
    cluster.settle()
    assert cluster.running == {"demo": 4}


_NO_GPUS = {"gpu": "none"}


@pytest.mark.parametrize("gpu", ["none", "reserve"])
def test_a_run_that_moves_to_other_machines_holds_the_old_ones_until_it_has_saved(cluster: Cluster, gpu: str) -> None:
    """Its new config does not contain them any more. A run that is removed has no config at all."""
    cluster.swarm.stop_advances = 6
    hosts = {"hosts": ["gpu-0", "gpu-1"], "swarm": {"gpu": gpu}}
    cluster.submit("demo", nodes=2, **hosts)
    cluster.settle()
    cluster.submit("demo", nodes=2, hosts=["gpu-2", "gpu-3"], swarm={"gpu": gpu})
    cluster.submit("other", nodes=2, **hosts)
    cluster.settle(rounds=4)
    assert cluster.running == {"demo": 2}, "its nodes save; the new ones wait for all of them"
    cluster.settle()
    assert cluster.running == {"demo": 2, "other": 2}
    for item in cluster_state.list_services(cluster.swarm, "other"):
        if item.is_node:
            cluster.swarm.delete(f"/services/{item.id}")
    cluster.submit("next", nodes=2, **hosts)
    cluster.settle(rounds=4)
    assert cluster.read_entry("next").state == "waiting"
    cluster.settle()
    assert cluster.running == {"demo": 2, "next": 2}


def test_an_unchanged_deploy_while_a_machine_is_down_stops_nothing(cluster: Cluster) -> None:
    """The scheduler moves the node to the free machine, although nobody knows what still runs on the machine that is down."""
    cluster.submit("demo", nodes=3)
    cluster.settle()
    machines = cluster.read_entry("demo").machines
    next(node for node in cluster.swarm.nodes if node["ID"] == machines["node0"])["Status"]["State"] = "down"
    cluster.submit("demo", nodes=3)
    assert cluster.read_entry("demo").machines == machines
    cluster.settle()
    moved = cluster.read_entry("demo").machines
    assert moved["node0"] != machines["node0"]
    assert {**moved, "node0": ""} == {**machines, "node0": ""}


def test_a_run_with_a_machine_that_is_down_can_be_preempted_and_comes_back(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=3)
    cluster.settle()
    lost = cluster.read_entry("demo").machines["node0"]
    next(node for node in cluster.swarm.nodes if node["ID"] == lost)["Status"]["State"] = "down"
    cluster.submit("urgent", nodes=3, priority="high")
    cluster.settle()
    assert cluster.read_entry("urgent").state == "admitted"
    assert not cluster.read_entry("demo").is_saving
    cluster.swarm.complete_run("urgent")
    cluster.settle()
    assert cluster.read_entry("demo").state == "admitted"


def test_a_deploy_that_is_killed_at_any_write_blocks_nobody() -> None:
    """It changes what the nodes need. Whichever write is its last, an urgent run starts, and the same deploy completes it."""
    kills = 0
    for write in range(40):
        cluster = Cluster()
        cluster.submit("demo", nodes=4, **_claim_gpus(1))
        cluster.submit("other", nodes=1, **_claim_gpus(1))
        cluster.settle()
        cluster.swarm.writes_until_kill = write
        try:
            cluster.submit("demo", nodes=4, **_claim_gpus(2))
        except Killed:
            kills += 1
        cluster.swarm.writes_until_kill = None
        cluster.settle()
        assert len(cluster.read_entry("demo").machines) in (0, 4), f"killed at write {write}"
        cluster.submit("urgent", nodes=3, priority="high", **_claim_gpus(2))
        cluster.settle()
        assert cluster.running["urgent"] == 3, f"killed at write {write}"
        cluster.submit("demo", nodes=4, **_claim_gpus(2))
        for run in ("urgent", "other"):
            cluster.swarm.complete_run(run)
            cluster.settle()
        assert cluster.running == {"demo": 4}, f"killed at write {write}"
    assert kills >= 5, "the deploy makes at least so many writes"


def test_a_run_that_stops_sharing_waits_until_its_machines_are_its_own(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=4, share=True, swarm=_NO_GPUS)
    cluster.submit("other", nodes=1, share=True, swarm=_NO_GPUS)
    cluster.settle()
    assert cluster.running == {"demo": 4, "other": 1}
    cluster.submit("demo", nodes=4, swarm=_NO_GPUS)
    cluster.settle()
    assert cluster.running == {"other": 1}
    cluster.swarm.complete_run("other")
    cluster.settle()
    assert cluster.running == {"demo": 4}


def test_the_next_round_is_due_when_a_time_limit_is_near(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=1, time_limit=100, stop_grace=5)
    cluster.settle()
    cluster.now += 80
    assert cluster.scheduler.run_round() == 15
    cluster.settle(seconds=15)
    assert cluster.read_entry("demo").state == "stopped"


def _play_preemption(cluster: Cluster, make_round: Callable[[], None]) -> None:
    """Submit an elastic run, a low one and an urgent one, with rounds in between, until all could have started."""
    cluster.submit("elastic", nodes=3, min_nodes=1)
    cluster.submit("low", nodes=1, priority="low")
    for _ in range(8):
        make_round()
    cluster.submit("urgent", nodes=3, priority="high")
    for _ in range(12):
        make_round()


def test_a_scheduler_that_is_killed_at_any_write_loses_nothing() -> None:
    """Whichever write is its last, the next scheduler comes to the same end, and no GPU is given to two runs on the way."""
    kills = 0
    for write in range(60):
        cluster = Cluster()
        is_killed = False

        def make_round(cluster: Cluster = cluster, write: int = write) -> None:
            nonlocal is_killed
            if not is_killed and cluster.swarm.writes_until_kill is None:
                cluster.swarm.writes_until_kill = write
            try:
                cluster.scheduler.run_round()
            except Killed:
                is_killed = True
                cluster.restart_scheduler()
                cluster.swarm.objects["configs"] = {  # the lock of the run counts as free after some seconds
                    key: item for key, item in cluster.swarm.objects["configs"].items() if not item["Spec"]["Name"].endswith("_lock")
                }
            cluster.swarm.advance()
            cluster.check_no_double_allocation()

        _play_preemption(_without_kills_in_submissions(cluster), make_round)
        kills += is_killed
        assert cluster.running == {"elastic": 1, "urgent": 3}, f"killed at write {write}"
        assert cluster.read_entry("low").state == "waiting"
    assert kills >= 8, "the scheduler makes at least so many writes"


def _without_kills_in_submissions(cluster: Cluster) -> Cluster:
    """Return `cluster`; only the scheduler is killed in it, not the users' commands."""
    submit = cluster.submit

    def submit_safely(run: str, **runner: Any) -> list[ReconcileStep]:
        kept, cluster.swarm.writes_until_kill = cluster.swarm.writes_until_kill, None
        try:
            return submit(run, **runner)
        finally:
            cluster.swarm.writes_until_kill = kept

    cluster.submit = submit_safely  # type: ignore[method-assign]  # of this object only
    return cluster


def test_a_scheduler_without_its_lock_changes_nothing(cluster: Cluster) -> None:
    cluster.submit("demo", nodes=1)

    def lose() -> None:
        raise StackError("lost")

    scheduler = Scheduler(cluster.swarm, lambda _line: None, check_leader=lose, get_time=lambda: cluster.now)
    with pytest.raises(LeadershipLost):
        scheduler.run_round()
    assert cluster.read_entry("demo").state == "waiting"


def test_a_run_that_a_command_changes_is_left_alone(cluster: Cluster) -> None:
    """The scheduler does not wait for the lock of a run; it schedules the others."""
    cluster.submit("locked", nodes=1)
    cluster.submit("other", nodes=1)
    name = "locked_lock"
    cluster.swarm.post("/configs/create", {"Name": name, "Labels": {"swarmtrain.lock.run": "locked"}, "Data": ""})
    cluster.settle()
    assert cluster.running == {"other": 1}
    cluster.swarm.delete(f"/configs/{name}")
    cluster.settle()
    assert cluster.running == {"other": 1, "locked": 1}


@pytest.mark.parametrize(("state", "hint"), [("unknown", "try again in 30 s"), ("down", "start the node")])
def test_a_plan_on_nodes_that_are_all_unavailable(cluster: Cluster, state: str, hint: str) -> None:
    for node in cluster.swarm.nodes:
        node["Status"]["State"] = state
    with pytest.raises(PlanError, match=f"1 node requested, but 0 can be used .*gpu-0 is {state}") as error:
        cluster.plan("demo", nodes=1)
    assert hint in (error.value.hint or "")
