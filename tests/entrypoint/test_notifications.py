"""Notifications of whole runs on this machine: a real coordinator, real supervisors, and a receiver that answers, fails or is slow."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.notifications.channel import ChannelSettings, encode_channels
from swarmtrain.notifications.notification import NotificationKind
from swarmtrain.process import run_command
from swarmtrain.protocol import ENV_NOTIFY, Event, describe_outcome, format_run_summary
from swarmtrain.queue_labels import ENV_QUEUE_STOP
from tests.webhook_receiver import KEY, URL_TOKEN, Receiver, read_process_arguments, receive_webhooks

FAILS = "import time; time.sleep(2); raise ValueError('no such thing')"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receive_webhooks() as receiver:
        yield receiver


def build_environment(*secrets: Path) -> dict[str, str]:
    """Return the variable of a coordinator with a webhook for each of these secret files."""
    channels = [ChannelSettings(f"channel{number}", "webhook", tuple(NotificationKind), str(file)) for number, file in enumerate(secrets)]
    return {ENV_NOTIFY: encode_channels(channels)}


def start_failing_run(run: Any, receiver: Receiver, node_count: int = 2) -> dict[str, str]:
    """Start a run whose script fails, and return the variables of its coordinator."""
    environment = build_environment(receiver.write_secret(run.folder / "secret"))
    run.start_coordinator(max_restarts=0, min_nodes=node_count, environment=environment)
    for number in range(node_count):
        run.start_node(number, FAILS, slots=1, node_range=(node_count, node_count))
    return environment


def replace_coordinator(run: Any, environment: dict[str, str]) -> None:
    """Kill the coordinator, and start another one, as Swarm does; unless it has ended by itself, after which Swarm starts none."""
    run.coordinator.send_signal(signal.SIGKILL)
    if run.coordinator.wait() == 0:
        return
    run.start_coordinator(max_restarts=0, min_nodes=len(run.nodes), environment=environment)


def list_notes(run: Any) -> list[str]:
    return [event.data["message"] for event in run.read_events("note") if "channel" in event.data["message"]]


def test_a_failure_reaches_the_receiver_within_5_s_with_the_first_line_of_why(small_run: Any, receiver: Receiver) -> None:
    start_failing_run(small_run, receiver)
    outcome = small_run.wait_for_event("outcome")
    [notification] = receiver.wait_for_accepted(1)
    assert notification["time"] - outcome.time < 5.0
    assert notification["is_signed"]
    assert notification["body"]["type"] == "run.outcome"
    data = notification["body"]["data"]
    assert data["message"] == format_run_summary("small", describe_outcome(outcome.data))
    assert "ValueError: no such thing" in data["message"]
    assert (data["id"], data["status"], data["exit_code"]) == (notification["id"], "failed", 1)

    arguments = read_process_arguments(small_run.coordinator.pid)
    assert ENV_NOTIFY in arguments
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "coordinator": 0}
    assert len(receiver.requests) == 1
    for text in (arguments, small_run.format_transcript()):
        assert URL_TOKEN not in text
        assert KEY not in text


def test_an_outcome_without_any_node_is_notified_too(small_run: Any, receiver: Receiver) -> None:
    small_run.start_coordinator(environment=build_environment(receiver.write_secret(small_run.folder / "secret")))
    small_run.wait_for_event("coordinator")
    data = {"node": "node0", "error": "no such image", "exit_code": 1, "permanent": True}
    small_run.post_event(Event("failure", data))
    [notification] = receiver.wait_for_accepted(1)
    assert notification["time"] - small_run.wait_for_event("outcome").time < 5.0
    assert small_run.coordinator.wait(10) == 0


_MORE_MOMENTS = pytest.mark.test_all_only("the gate kills the coordinator at two moments")


@pytest.mark.parametrize("seconds", [0.0, 2.0, *(pytest.param(moment, marks=_MORE_MOMENTS) for moment in (0.4, 0.8, 1.6, 2.2, 2.4))])
def test_an_outcome_is_notified_although_the_coordinator_is_killed(small_run: Any, receiver: Receiver, seconds: float) -> None:
    """Before the node knows the outcome, it trains on with the successor, which decides it; after that, the successor adopts it."""
    receiver.delay = 0.5
    environment = start_failing_run(small_run, receiver, node_count=1)
    small_run.wait_for_event("outcome")
    time.sleep(seconds)
    replace_coordinator(small_run, environment)
    receiver.wait_for_accepted(1, timeout=60.0)
    assert small_run.nodes["node0"].wait(60) == 0
    assert small_run.wait_for_exit(timeout=30.0) == {"node0": 0, "coordinator": 0}
    reasons = {event.data["reason"] for event in small_run.read_events("outcome")}
    assert len(reasons) == 1, "the successor has decided another outcome"


@pytest.mark.parametrize("delay", [0.0, 2.0])
def test_an_outcome_that_a_node_knows_is_notified_again_with_the_same_id(small_run: Any, receiver: Receiver, delay: float) -> None:
    """The receiver has answered when the coordinator is killed, or is at work."""
    receiver.delay = delay
    environment = start_failing_run(small_run, receiver, node_count=1)
    small_run.wait_for_event("left")
    replace_coordinator(small_run, environment)
    receiver.delay = 0.0
    receiver.wait_for_accepted(2)
    assert small_run.wait_for_exit(timeout=60.0) == {"node0": 0, "coordinator": 0}
    first, second = small_run.read_events("outcome")
    assert first.data == second.data
    assert receiver.accepted_ids == [f"small-outcome-{first.data['round']}"] * 2


def test_a_stop_ends_the_wait_of_a_node_for_a_lost_coordinator(small_run: Any, receiver: Receiver) -> None:
    receiver.statuses = [500] * 100  # the coordinator does not end before it is killed
    start_failing_run(small_run, receiver, node_count=1)
    small_run.wait_for_event("left")
    small_run.coordinator.kill()
    assert small_run.coordinator.wait() != 0
    node = small_run.nodes["node0"]
    time.sleep(1.0)
    assert node.poll() is None, "the node did not keep the outcome for the next coordinator"
    node.terminate()
    assert node.wait(5) == 0


@pytest.mark.parametrize("statuses", [[500, 503], [302]])
def test_a_failed_delivery_is_repeated_with_the_same_id(small_run: Any, receiver: Receiver, statuses: list[int]) -> None:
    receiver.statuses = list(statuses)
    start_failing_run(small_run, receiver, node_count=1)
    receiver.wait_for_accepted(1, timeout=60.0)
    assert {request["id"] for request in receiver.requests} == set(receiver.accepted_ids)
    assert {request["path"] for request in receiver.requests} == {f"/{URL_TOKEN}"}  # a redirect is not followed
    assert all(request["is_signed"] for request in receiver.requests)
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    [note] = list_notes(small_run)
    assert f"HTTP status {statuses[0]}" in note
    assert URL_TOKEN not in note


def test_a_receiver_that_is_down_neither_changes_nor_delays_the_outcome(small_run: Any, receiver: Receiver) -> None:
    """One channel is down, one does not answer, and one has a malformed secret. The nodes end some seconds later."""
    secrets = [receiver.write_secret(small_run.folder / "slow"), small_run.folder / "down", small_run.folder / "malformed"]
    secrets[1].write_text(f"http://127.0.0.1:9/{URL_TOKEN}\n{KEY}\n")
    secrets[2].write_text(f"{URL_TOKEN}\n{KEY}\n")
    receiver.delay = 20.0
    small_run.start_coordinator(max_restarts=0, min_nodes=1, environment=build_environment(*secrets))
    small_run.start_node(0, FAILS, slots=1, node_range=(1, 1))
    outcome = small_run.wait_for_event("outcome")
    assert outcome.data["exit_code"] == 1
    assert small_run.wait_for_exit(timeout=30.0) == {"node0": 0, "coordinator": 0}
    assert time.time() - outcome.time < 12.0
    notes = list_notes(small_run)
    assert notes[0] == "channel channel2: gets no notifications: the first line is not a URL that begins with https:// or http://"
    assert "connection refused" in notes[1]
    assert [note.partition(":")[0] for note in notes[2:]] == ["channel channel0", "channel channel1"]
    assert all("gave up" in note for note in notes[2:])
    assert URL_TOKEN not in small_run.format_transcript()


def test_other_events_are_notified_once_by_each_coordinator_to_the_channels_that_want_them(small_run: Any, receiver: Receiver) -> None:
    with receive_webhooks() as other:
        channels = [
            ChannelSettings("conditions", "webhook", ("straggler", "disk"), str(receiver.write_secret(small_run.folder / "a"))),
            ChannelSettings("outcomes", "webhook", ("outcome",), str(other.write_secret(small_run.folder / "b"))),
        ]
        environment = {ENV_NOTIFY: encode_channels(channels)}
        small_run.start_coordinator(max_restarts=3, min_nodes=1, environment=environment)
        small_run.start_training_node(0, slots=1, node_range=(1, 1))
        small_run.wait_for_event("progress")
        slow = {"message": "rank 0 on node0: other ranks wait", "rank": 0, "node": "node0", "slowdown": 0.4, "phase": "data"}
        full = {"node": "node0", "path": "/data", "free": 10**9, "total": 10**12, "message": "the disk of /data has 1 GB left on node0"}
        for event in (Event("straggler", slow), Event("disk", full), Event("disk", {**full, "node": "node1"})):
            small_run.post_event(event)
        receiver.wait_for_accepted(2)
        small_run.coordinator.kill()
        small_run.coordinator.wait()
        small_run.start_coordinator(max_restarts=3, min_nodes=1, environment=environment)
        small_run.wait_for_event("coordinator", count=2)
        small_run.post_event(Event("straggler", slow))  # reported again by the ranks, which have started again
        receiver.wait_for_accepted(3)
        small_run.finish_training(worlds=2)
        other.wait_for_accepted(1)
        assert [request["body"]["type"] for request in receiver.accepted] == ["run.straggler", "run.disk", "run.straggler"]
        assert len(set(receiver.accepted_ids)) == 3
        assert [request["body"]["data"]["status"] for request in other.accepted] == ["done"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_nearly_full_is_notified(small_run: Any, receiver: Receiver) -> None:
    disk = small_run.folder / "disk"
    disk.mkdir()
    run_command(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)])
    try:
        (disk / "checkpoint").write_bytes(bytes(8_000_000))
        (small_run.folder / "config.json").write_text(json.dumps({"trainer": {"save_dir": str(disk / "run")}, "logger": {"log_dir": None}}))
        small_run.start_coordinator(min_nodes=1, environment=build_environment(receiver.write_secret(small_run.folder / "secret")))
        small_run.start_training_node(0, slots=1, node_range=(1, 1))
        [notification] = receiver.wait_for_accepted(1, timeout=60.0)
        assert notification["body"]["type"] == "run.disk"
        assert f"the disk of {disk}/run on node0 is nearly full" in notification["body"]["data"]["message"]
        small_run.close()
    finally:
        run_command(["umount", "--lazy", str(disk)])


_PREEMPTED, _AT_LIMIT = "preempted: high of anna has a higher priority", "reached its time limit of 2h"


@pytest.mark.parametrize(
    ("stop", "kind", "text"),
    [
        (f"3 resumes {_PREEMPTED}", "preemption", f"{_PREEMPTED}; 3 steps are lost, and it resumes by itself"),
        (f"0 ends {_AT_LIMIT}", "stop", f"{_AT_LIMIT}; no step is lost"),
    ],
)
def test_a_coordinator_that_is_started_after_a_stop_by_the_queue_notifies_with_the_same_id_each_time(
    small_run: Any, receiver: Receiver, stop: str, kind: str, text: str
) -> None:
    environment = build_environment(receiver.write_secret(small_run.folder / "secret"))
    environment[ENV_QUEUE_STOP] = f"1700000000 {stop}"
    for count in (1, 2):
        small_run.start_coordinator(environment=environment)
        notifications = receiver.wait_for_accepted(count)
        small_run.coordinator.kill()
        small_run.coordinator.wait()
    assert [request["id"] for request in notifications] == [f"small-{kind}-1700000000"] * 2
    assert notifications[0]["body"]["data"]["message"] == f"run small: {text}"
    assert notifications[0]["body"]["type"] == f"run.{kind}"


def test_an_outcome_reaches_a_service_of_apprise_within_5_s(small_run: Any, receiver: Receiver) -> None:
    """The service is apprise's own kind of webhook. Its URL is in no command line and in no log."""
    secret = small_run.folder / "secret"
    secret.write_text(receiver.url.replace("http://", "json://"))
    channels = [ChannelSettings("chat", "apprise", ("outcome",), str(secret))]
    small_run.start_coordinator(max_restarts=0, min_nodes=1, environment={ENV_NOTIFY: encode_channels(channels)})
    small_run.start_node(0, FAILS, slots=1, node_range=(1, 1))
    outcome = small_run.wait_for_event("outcome")
    [request] = receiver.wait_for_accepted(1)
    assert request["time"] - outcome.time < 5.0
    assert request["body"]["message"] == format_run_summary("small", describe_outcome(outcome.data))
    assert request["body"]["type"] == "failure"
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    assert list_notes(small_run) == []
    assert URL_TOKEN not in small_run.format_transcript()
