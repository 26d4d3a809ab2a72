"""Notifications of runs on a real swarm that nobody follows: a coordinator that is killed, stops by the queue, and where the secret is."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm_helpers import DISCARD, print_line

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import RunNotFound
from swarmtrain.lab import Lab
from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.launchers.swarm.queue import policy_store
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.queueing import queue_service
from tests.webhook_receiver import KEY, URL_TOKEN, ReceiverProcess, start_lab_receiver

_FAILS = b"import time\ntime.sleep(2)\nraise ValueError('no such thing')\n"
_WAITS = b"import time\ntime.sleep(600)\n"


@pytest.fixture
def start_receiver(lab: Lab, tmp_path: Path) -> Iterator[Callable[[float], ReceiverProcess]]:
    receivers: list[ReceiverProcess] = []

    def start(delay: float) -> ReceiverProcess:
        receivers.append(start_lab_receiver(lab, tmp_path, delay))
        return receivers[-1]

    yield start
    for receiver in receivers:
        receiver.close()


@pytest.fixture
def launcher(lab: Lab) -> Iterator[SwarmLauncher]:
    launcher = SwarmLauncher(lab.get_docker_host("node0"))
    yield launcher
    for run in launcher.list_runs():
        with contextlib.suppress(RunNotFound):
            launcher.tear_down_run(run, DISCARD)


def plan_notified_run(launcher: SwarmLauncher, image: str, receiver: ReceiverProcess | None, script: bytes, **runner: Any) -> Plan:
    settings = {"nodes": 1, "stop_grace": 10, "max_restarts": 0, "docker_config": {"docker_container": image}, **runner}
    sections: dict[str, Any] = {"runner": settings}
    secrets: tuple[RunFile, ...] = ()
    if receiver:
        sections["notify"] = {"ci": {"secret": "webhook.secret"}}
        secrets = (RunFile.from_content("notify-ci", receiver.secret.encode()),)
    config = Config.model_validate_json(json.dumps(sections))
    cargo = Cargo((RunFile.from_content("training_code.py", script),), secrets)
    run = str(runner.get("priority", "notified"))
    return build_plan(config, launcher.read_inventory(config.runner), cargo, run=run)


def find_coordinator_container(lab: Lab, run: str) -> tuple[str, list[str]]:
    """Return the id of the container of the coordinator that runs, and the docker command of its machine."""
    for node in ("node0", "node1", "node2"):
        docker = ["docker", "-H", lab.get_docker_host(node)]
        listing = [*docker, "ps", "-q", "--filter", f"name={run}_rendezvous"]
        if found := subprocess.run(listing, capture_output=True, check=True, text=True).stdout.split():
            return found[0], docker
    raise AssertionError("no coordinator runs")


def collect_docker_output(lab: Lab, launcher: SwarmLauncher, run: str) -> str:
    """Return everything that Docker reports about services, containers, configs and secrets, and the log of the coordinator."""
    outputs = [json.dumps([line.text for line in launcher.stream_logs(run, follow=False)])]
    for node in ("node0", "node1", "node2"):
        docker = ["docker", "-H", lab.get_docker_host(node)]
        for kind in ("container", *(("service", "config", "secret") if node == "node0" else ())):
            listing = [*docker, kind, "ls", "-q", *(["-a"] if kind == "container" else [])]
            ids = subprocess.run(listing, capture_output=True, check=True, text=True).stdout.split()
            if ids:
                outputs.append(subprocess.run([*docker, kind, "inspect", *ids], capture_output=True, check=True, text=True).stdout)
                if kind == "config":
                    outputs += [base64.b64decode(item["Spec"]["Data"]).decode(errors="replace") for item in json.loads(outputs[-1])]
            if kind == "container":
                outputs += [subprocess.run([*docker, "logs", item], capture_output=True, check=True, text=True).stdout for item in ids]
    return "\n".join(outputs)


def test_an_outcome_is_notified_again_with_the_same_id_although_the_coordinator_is_killed(
    lab: Lab, launcher: SwarmLauncher, image: str, start_receiver: Callable[[float], ReceiverProcess]
) -> None:
    """The receiver is at work when the container is killed, so its answer is lost. Swarm starts another one, which adopts the outcome."""
    receiver = start_receiver(2.5)
    plan = plan_notified_run(launcher, image, receiver, _FAILS)
    launcher.deploy_run(plan, print_line)
    config, cargo = launcher.load_deployment("notified")
    assert config.notify == plan.config.notify
    assert [item.name for item in cargo.channel_secrets] == ["notify-ci"]
    assert cargo.node_secrets == ()
    container, docker = find_coordinator_container(lab, "notified")
    secret = subprocess.run([*docker, "exec", container, "cat", "/run/secrets/notify-ci"], capture_output=True, check=True, text=True)
    assert secret.stdout.splitlines()[0] == receiver.url

    [first] = receiver.wait_for_requests(1)
    wait_for_event(launcher, "left")  # the node knows the outcome
    subprocess.run([*docker, "kill", "--signal", "KILL", container], check=True)
    requests = receiver.wait_for_requests(2)
    time.sleep(5)
    assert {request["id"] for request in receiver.read_requests()} == {first["id"]}
    assert all(request["is_signed"] for request in requests)
    assert first["body"]["type"] == "run.outcome"
    assert first["body"]["data"]["message"].startswith("run notified: failed, node0 rank 0: ValueError: no such thing")

    output = collect_docker_output(lab, launcher, "notified")
    assert "SWARMTRAIN_NOTIFY" in output
    assert URL_TOKEN not in output
    assert KEY not in output


def test_an_undisturbed_outcome_arrives_within_5_s_and_that_of_a_second_deploy_is_another(
    launcher: SwarmLauncher, image: str, start_receiver: Callable[[float], ReceiverProcess]
) -> None:
    receiver = start_receiver(0.0)
    plan = plan_notified_run(launcher, image, receiver, _FAILS)
    launcher.deploy_run(plan, print_line)
    [request] = receiver.wait_for_requests(1)
    [outcome] = [event for event in launcher.read_events("notified") if event.kind == "outcome"]
    assert request["time"] - outcome.time < 5.0  # one machine, one clock
    wait_for_tasks(launcher, "notified", lambda tasks: all(task.state == "complete" for task in tasks))
    assert len(receiver.read_requests()) == 1
    launcher.deploy_run(plan, print_line)  # a failed run is restarted
    requests = receiver.wait_for_requests(2)
    assert requests[0]["id"] != requests[1]["id"]


@pytest.fixture
def cluster_channel(engine: DockerEngine, image: str, start_receiver: Callable[[float], ReceiverProcess]) -> Iterator[ReceiverProcess]:
    """A scheduler, and a policy with a channel for all runs, whose secret is one of the swarm."""
    receiver = start_receiver(0.0)
    content = base64.b64encode(receiver.secret.encode()).decode()
    secret = engine.post("/secrets/create", {"Name": "team-webhook", "Labels": {}, "Data": content})["ID"]
    policy_store.store_policy(engine, "notify: {ops: {swarm_secret: team-webhook, events: [preemption, stop]}}\n", source="policy.yml")
    queue_service.start_scheduler(engine, image, print_line)
    yield receiver
    queue_service.remove_scheduler(engine, DISCARD)
    engine.delete(f"/configs/{policy_store.find_policy_id(engine)}")
    engine.delete(f"/secrets/{secret}")


@pytest.mark.test_all_only("two training runs; the gate has preemption and notifications, each by itself")
def test_a_preempted_run_is_notified_with_the_run_that_has_replaced_it(
    cluster_channel: ReceiverProcess, launcher: SwarmLauncher, image: str
) -> None:
    """Both through its own channel, and through that of the policy, whose secret stays when the runs are removed."""
    receiver = cluster_channel
    launcher.deploy_run(plan_notified_run(launcher, image, receiver, _WAITS, priority="low", nodes=3), print_line)
    wait_for_nodes(launcher, "low", 3)
    launcher.deploy_run(plan_notified_run(launcher, image, None, _WAITS, priority="high", nodes=3), print_line)
    requests = receiver.wait_for_requests(2)
    assert {request["body"]["type"] for request in requests} == {"run.preemption"}
    assert len({request["id"] for request in requests}) == 1  # one notification, two channels
    message = requests[0]["body"]["data"]["message"]
    assert message.startswith("run low: preempted: high of ")
    assert message.endswith("has a higher priority; no step is lost, and it resumes by itself")
    wait_for_nodes(launcher, "high", 3)
    launcher.tear_down_run("high", DISCARD)
    wait_for_nodes(launcher, "low", 3)
    time.sleep(5)
    assert len(receiver.read_requests()) == 2
    config, cargo = launcher.load_deployment("low")
    assert (list(config.notify), [item.name for item in cargo.secrets]) == (["ci"], ["notify-ci"])
    launcher.tear_down_run("low", DISCARD)


def test_a_run_that_reaches_its_time_limit_is_notified(cluster_channel: ReceiverProcess, launcher: SwarmLauncher, image: str) -> None:
    launcher.deploy_run(plan_notified_run(launcher, image, None, _WAITS, time_limit=20, stop_grace=5), print_line)
    [request] = cluster_channel.wait_for_requests(1)
    assert request["body"]["type"] == "run.stop"
    assert request["body"]["data"]["message"] == "run notified: reached its time limit of 20s; no step is lost"


def wait_for_event(launcher: SwarmLauncher, kind: str) -> None:
    deadline = time.monotonic() + 60.0
    while not any(event.kind == kind for event in launcher.read_events("notified")):
        assert time.monotonic() < deadline, f"no event {kind}"
        time.sleep(0.1)


def wait_for_nodes(launcher: SwarmLauncher, run: str, count: int) -> None:
    """Wait until exactly this number of nodes of a run are running."""
    wait_for_tasks(launcher, run, lambda tasks: sum(task.state == "running" and task.node != "rendezvous" for task in tasks) == count)


def wait_for_tasks(launcher: SwarmLauncher, run: str, condition: Callable[[list[TaskState]], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition(tasks := launcher.list_tasks(run)):
        assert time.monotonic() < deadline, tasks
        time.sleep(0.5)
