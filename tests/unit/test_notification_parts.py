"""The parts of notifications, without processes: signatures, secrets of channels, events, and the order of deliveries."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.cargo import Cargo, RunFile, read_cargo
from swarmtrain.cli import run_command_line
from swarmtrain.config import Config
from swarmtrain.config.loader import load_config
from swarmtrain.doctor.probe import run_probe
from swarmtrain.entrypoint.coordinator.node_quarantine import NodeQuarantine
from swarmtrain.entrypoint.coordinator.notification_events import MAX_MESSAGE_LENGTH, find_notable_event, is_end_of_straggler
from swarmtrain.entrypoint.coordinator.notifier import MAX_QUEUED_NOTIFICATIONS, Notifier
from swarmtrain.entrypoint.disk_space import DiskMonitor, list_written_folders
from swarmtrain.errors import ChannelGone, ConfigError, DeliveryError, StackError, SwarmtrainError
from swarmtrain.notifications.apprise_process import send_with_apprise
from swarmtrain.notifications.channel import (
    ChannelSettings,
    check_secret,
    decode_channels,
    encode_channels,
    parse_webhook_secret,
)
from swarmtrain.notifications.delivery import build_delivery
from swarmtrain.notifications.notification import Notification
from swarmtrain.notifications.webhook import post_notification, sign_message
from swarmtrain.planning.inventory import build_offline_inventory
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.process import run_command
from swarmtrain.protocol import ENV_NOTIFY, Event
from swarmtrain.render.compose_file import render_compose
from swarmtrain.render.stack_document import Stack, render_stack, render_stack_yaml
from tests.webhook_receiver import KEY, URL_TOKEN, Receiver, receive_webhooks

URL = f"https://hooks.example/{URL_TOKEN}"


def test_a_signature_is_that_of_standard_webhooks() -> None:
    """The values are those of the test of the specification's own library, libraries/javascript/src/webhook.test.ts."""
    key = parse_webhook_secret(f"{URL}\n{KEY}\n".encode()).key
    signature = sign_message(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "must have two lines, the URL and the key, not 0"),
        (f"{URL}\n".encode(), "must have two lines, the URL and the key, not 1"),
        (f"{URL}\n{KEY}\n{KEY}".encode(), "not 3"),
        (f"ftp://hooks.example/{URL_TOKEN}\n{KEY}".encode(), "the first line is not a URL"),
        (f"https:///{URL_TOKEN}\n{KEY}".encode(), "the first line is not a URL"),
        (f"https://h:port/{URL_TOKEN}\n{KEY}".encode(), "the first line is not a URL"),
        (f"https://h/a b{URL_TOKEN}\n{KEY}".encode(), "the first line is not a URL"),
        (f"https://me:{URL_TOKEN}@h/\n{KEY}".encode(), "has a user name or a password"),
        (f"{URL}\n{URL_TOKEN}".encode(), "the second line is not a key"),
        (f"{URL}\nwhsec_%%%%".encode(), "the second line is not a key"),
        (f"{URL}\nwhsec_{base64.b64encode(bytes(23)).decode()}".encode(), "the second line is not a key"),
        (f"{URL}\nwhsec_{base64.b64encode(bytes(65)).decode()}".encode(), "the second line is not a key"),
        (b"\xff\xfe", "the file is not text in UTF-8"),
    ],
)
def test_a_malformed_webhook_is_described_without_its_content(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        check_secret("webhook", content)
    assert reason in str(raised.value)
    assert URL_TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"# nothing\n\n", "but it has none"), (f"ntfys://a\n{URL_TOKEN}\n".encode(), "URL 2 of the file is not")]
)
def test_a_malformed_file_of_apprise_is_described_without_its_content(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        check_secret("apprise", content)
    assert URL_TOKEN not in str(raised.value)


def test_a_secret_has_no_text_form() -> None:
    secret = parse_webhook_secret(f"{URL}\r\n{KEY}\r\n".encode())
    assert secret.url == URL
    assert URL_TOKEN not in repr(secret)


def test_the_settings_of_channels_pass_through_the_variable() -> None:
    channels = (ChannelSettings("ci", "webhook", ("outcome", "disk"), "/run/secrets/notify-ci"),)
    assert decode_channels(encode_channels(channels)) == channels
    assert decode_channels("") == ()
    with pytest.raises(ValueError, match="malformed channel"):
        decode_channels('[{"name": "ci"}]')


@pytest.mark.parametrize(("status", "error_class"), [(500, DeliveryError), (301, DeliveryError), (404, DeliveryError), (410, ChannelGone)])
def test_a_status_above_299_is_a_failure(status: int, error_class: type[Exception]) -> None:
    with receive_webhooks() as receiver:
        receiver.statuses = [status]
        secret = parse_webhook_secret(f"{receiver.url}\n{KEY}".encode())
        with pytest.raises(error_class, match=str(status)) as raised:
            post_notification(secret, build_notification("1"), 0, 5.0)
        assert type(raised.value) is error_class
        assert len(receiver.requests) == 1
        assert URL_TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9/{}", "connection refused"),
        ("http://does-not-resolve.invalid/{}", "not known|resolution"),
    ],
)
def test_an_unreachable_receiver_is_described_without_its_url(url: str, reason: str) -> None:
    secret = parse_webhook_secret(f"{url.format(URL_TOKEN)}\n{KEY}".encode())
    with pytest.raises(DeliveryError, match=reason) as raised:
        post_notification(secret, build_notification("1"), 0, 5.0)
    assert URL_TOKEN not in str(raised.value)
    assert "127.0.0.1" not in str(raised.value)


def test_a_receiver_that_answers_too_late_is_a_failure() -> None:
    with receive_webhooks() as receiver:
        receiver.delay = 2.0
        secret = parse_webhook_secret(f"{receiver.url}\n{KEY}".encode())
        with pytest.raises(DeliveryError, match="no response in time"):
            post_notification(secret, build_notification("1"), 0, 0.3)


@pytest.mark.parametrize("is_tls", [True, False])
def test_a_webhook_over_https_needs_a_valid_certificate(tmp_path: Path, *, is_tls: bool) -> None:
    """Neither a server whose certificate nobody has signed, nor one without TLS, gets anything of the request."""
    with receive_webhooks() as receiver:
        if is_tls:
            key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
            request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
            run_command([*request, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate])
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
        deliver = build_delivery("webhook", f"{receiver.url.replace('http:', 'https:')}\n{KEY}".encode())
        with pytest.raises(DeliveryError, match="certificate is not valid: self-signed" if is_tls else "SSLError") as raised:
            deliver(build_notification("1"))
        assert URL_TOKEN not in str(raised.value)
        assert receiver.requests == []


def build_notification(notification_id: str, kind: str = "straggler") -> Notification:
    return Notification(notification_id, kind, "r", 1700000000.0, "run r: text", {"node": "node0"})


def test_the_body_of_a_webhook_has_type_timestamp_and_data() -> None:
    assert json.loads(build_notification("r-1").to_body()) == {
        "type": "run.straggler",
        "timestamp": "2023-11-14T22:13:20.000Z",
        "data": {"node": "node0", "id": "r-1", "run": "r", "message": "run r: text"},
    }


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("outcome", {"status": "failed", "reason": "node0 rank 1: a\nb", "exit_code": 1}), "run r: failed, node0 rank 1: a b"),
        (Event("quarantined", {"node": "node1", "seconds": 3600, "reason": "faulty"}), "run r: node1 is quarantined: faulty"),
        (Event("straggler", {"rank": 3, "node": "node1", "phase": "data", "message": "rank 3 is slow"}), "run r: rank 3 is slow"),
        (Event("disk", {"path": "/data", "total": 5, "message": "/data is nearly full"}), "run r: /data is nearly full"),
        (Event("straggler", {"rank": None, "message": "node1 is no longer a straggler"}), None),
        (Event("progress", {"step": 3}), None),
        (Event("failure", {"error": "x"}), None),
    ],
)
def test_events_that_are_worth_a_notification(event: Event, message: str | None) -> None:
    notable = find_notable_event("r", event)
    assert (notable.message if notable else None) == message


def test_the_event_of_a_quarantine_is_worth_a_notification() -> None:
    event = NodeQuarantine(1, lambda: 0.0).record_gpu_fault("node0", "Xid 79", {"node0", "node1"})
    assert event
    notable = find_notable_event("r", event)
    assert notable
    assert (notable.kind, notable.message) == ("quarantine", "run r: node0 is quarantined: faulty: Xid 79")


def test_a_long_reason_is_shortened() -> None:
    notable = find_notable_event("r", Event("outcome", {"status": "failed", "reason": "x" * 5000}))
    assert notable is not None
    assert len(notable.message) == len(notable.data["reason"]) == MAX_MESSAGE_LENGTH


def test_a_condition_that_lasts_has_a_key_until_it_ends() -> None:
    data = {"rank": 3, "node": "node1", "phase": "data", "message": "slow"}
    first, second = (find_notable_event("r", Event("straggler", {**data, "slowdown": slowdown})) for slowdown in (0.3, 0.5))
    assert first
    assert second
    assert first.key == second.key != ""
    assert is_end_of_straggler(Event("straggler", {"rank": None}))
    assert not is_end_of_straggler(Event("straggler", data))


def build_notifier(receiver: Receiver, folder: Path, *kinds: str) -> Notifier:
    channel = ChannelSettings("ci", "webhook", kinds, str(receiver.write_secret(folder / "secret")))
    return Notifier("r", "id", "boot", [channel], lambda _note: None)


OUTCOME = Event("outcome", {"status": "failed", "reason": "boom", "exit_code": 1, "round": "b-7"})


def test_of_many_notifications_the_oldest_are_given_up_and_an_outcome_goes_first(tmp_path: Path) -> None:
    with receive_webhooks() as receiver:
        notifier = build_notifier(receiver, tmp_path, "outcome", "quarantine")
        for number in range(150):
            notifier.observe_event(Event("quarantined", {"node": f"node{number}", "reason": "faulty"}))
        notifier.observe_event(OUTCOME)
        assert not notifier.is_finished
        notifier.start()
        outcome, *others = receiver.wait_for_accepted(MAX_QUEUED_NOTIFICATIONS)
        assert outcome["id"] == "id-outcome-b-7"
        assert [request["body"]["data"]["node"] for request in others] == [f"node{number}" for number in range(51, 150)]
        assert len(set(receiver.accepted_ids)) == MAX_QUEUED_NOTIFICATIONS


def test_a_refused_notification_is_retried_after_the_others(tmp_path: Path) -> None:
    with receive_webhooks() as receiver:
        receiver.statuses = [500]
        notifier = build_notifier(receiver, tmp_path, "quarantine")
        for node in ("node0", "node1"):
            notifier.observe_event(Event("quarantined", {"node": node, "reason": "faulty"}))
        notifier.start()
        receiver.wait_for_accepted(2)
        assert [request["body"]["data"]["node"] for request in receiver.requests] == ["node0", "node1", "node0"]


def test_a_condition_that_lasts_is_notified_once_until_it_has_ended(tmp_path: Path) -> None:
    slow = Event("straggler", {"rank": 3, "node": "node1", "phase": "data", "message": "slow"})
    with receive_webhooks() as receiver:
        notifier = build_notifier(receiver, tmp_path, "outcome", "straggler")
        for event in (slow, slow, Event("straggler", {"rank": None}), slow, OUTCOME):
            notifier.observe_event(event)
        notifier.start()
        assert [request["body"]["type"] for request in receiver.wait_for_accepted(3)] == ["run.outcome", "run.straggler", "run.straggler"]
        assert len(set(receiver.accepted_ids)) == 3


def test_a_channel_without_its_secret_delays_nothing(tmp_path: Path) -> None:
    notes: list[str] = []
    notifier = Notifier("r", "id", "boot", [ChannelSettings("ci", "webhook", ("outcome",), str(tmp_path / "nowhere"))], notes.append)
    notifier.start()
    notifier.observe_event(OUTCOME)
    assert notifier.is_finished
    assert notes == ["channel ci: gets no notifications: No such file or directory"]


def read_channel_error(folder: Path, content: str) -> SwarmtrainError:
    (folder / "secret").write_text(content)
    (folder / "script.py").write_text("pass\n")
    config = Config.model_validate_json(
        json.dumps({"runner": {"script": "script.py"}, "notify": {"ci": {"type": "webhook", "secret": "secret"}}})
    )
    with pytest.raises(SwarmtrainError) as raised:
        read_cargo(config, folder)
    return raised.value


def test_a_malformed_secret_file_is_refused_before_the_deploy(tmp_path: Path) -> None:
    error = read_channel_error(tmp_path, f"{URL}\n{URL_TOKEN}\n")
    assert error.place == "config notify.ci.secret"
    assert f"{tmp_path / 'secret'}: the second line is not a key" in error.message
    assert URL_TOKEN not in error.plain_text
    assert error.hint


def test_a_missing_secret_file_is_refused_before_the_deploy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("pass\n")
    config = Config.model_validate_json(
        json.dumps({"runner": {"script": "script.py"}, "notify": {"ci": {"type": "webhook", "secret": "nowhere"}}})
    )
    with pytest.raises(SwarmtrainError, match="nowhere") as raised:
        read_cargo(config, tmp_path)
    assert raised.value.place == "config notify.ci.secret"


CHANNEL_SECRET = RunFile.from_content("notify-ci", f"{URL}\n{KEY}\n".encode())
OTHER_SECRET = RunFile.from_content("TOKEN", b"hush")


def plan_notified_run(run: str = "demo", *, is_notified: bool = True) -> Plan:
    channels = {"ci": {"type": "webhook", "secret": "secret", "events": ["outcome"]}} if is_notified else {}
    config = Config.model_validate_json(json.dumps({"runner": {"hosts": ["a", "b"]}, "notify": channels}))
    cargo = Cargo((RunFile.from_content("train.py", b"pass"),), (OTHER_SECRET, *((CHANNEL_SECRET,) if is_notified else ())))
    return build_plan(config, build_offline_inventory(config.runner.host_entries), cargo, run=run)


@pytest.mark.parametrize("render", [render_stack, render_compose])
def test_only_the_coordinator_receives_the_secret_of_a_channel(render: Callable[[Plan], Stack]) -> None:
    stack = render(plan_notified_run())
    services = stack.document["services"]
    targets = {name: [item["target"] for item in service.get("secrets", ())] for name, service in services.items()}
    assert targets == {"node0": ["TOKEN"], "node1": ["TOKEN"], "rendezvous": ["notify-ci"]}
    channels = decode_channels(services["rendezvous"]["environment"][ENV_NOTIFY])
    assert channels == (ChannelSettings("ci", "webhook", ("outcome",), "/run/secrets/notify-ci"),)
    for name in ("node0", "node1"):
        assert "notify" not in json.dumps(services[name])
    texts = [render_stack_yaml(stack), *(content.decode() for name, content in stack.files.items() if "notify-ci" not in name)]
    assert not any(URL_TOKEN in text or KEY in text for text in texts)


def test_a_channel_that_is_added_restarts_no_node() -> None:
    notified, plain = (render_stack(plan_notified_run(is_notified=value)).document["services"] for value in (True, False))
    assert notified["rendezvous"] != plain["rendezvous"]
    assert [notified[name] for name in ("node0", "node1")] == [plain[name] for name in ("node0", "node1")]


def test_a_plan_names_the_channels() -> None:
    assert "notify.ci: webhook, outcome" in plan_notified_run().notes
    assert not any("notify" in note for note in plan_notified_run(is_notified=False).notes)


def test_the_channels_are_restored_from_what_only_labels_store() -> None:
    config = plan_notified_run().config
    assert config.to_node_config().notify == {}
    assert config.to_node_config().restore_notify(config.dump_notify()).notify == config.notify
    assert Config().dump_notify() == ""
    assert Config().restore_notify("") == Config()


class SimulatedDisk:
    def __init__(self, total: float, free: float) -> None:
        self.total, self.free = int(total), int(free)

    def read_usage(self, path: Path) -> tuple[int, int, int]:
        return self.total, self.total - self.free, self.free


@pytest.mark.parametrize(
    ("total", "free", "is_nearly_full"),
    [(1e12, 49e9, True), (1e12, 51e9, False), (100e12, 99e9, True), (100e12, 101e9, False), (20e9, 0, True), (0, 0, False)],
)
def test_a_disk_is_nearly_full_below_5_percent_and_100_gb(tmp_path: Path, total: float, free: float, *, is_nearly_full: bool) -> None:
    disk = SimulatedDisk(total, free)
    assert bool(DiskMonitor("node0", [tmp_path], disk.read_usage).find_nearly_full()) is is_nearly_full


def test_a_disk_that_stays_nearly_full_is_reported_once(tmp_path: Path) -> None:
    disk = SimulatedDisk(1e12, 40e9)
    monitor = DiskMonitor("node0", [tmp_path / "not" / "yet", tmp_path / "not" / "yet"], disk.read_usage)
    [event] = monitor.find_nearly_full()
    assert event.data["message"] == f"the disk of {tmp_path}/not/yet on node0 is nearly full: 40.0 GB of 1.0 TB are free"
    for free in (30e9, 60e9, 40e9):  # not yet twice the limit
        disk.free = int(free)
        assert monitor.find_nearly_full() == []
    disk.free = int(101e9)
    assert monitor.find_nearly_full() == []
    disk.free = int(40e9)
    assert len(monitor.find_nearly_full()) == 1


def test_two_folders_on_one_disk_are_one_report(tmp_path: Path) -> None:
    assert len(DiskMonitor("node0", [tmp_path / "runs", tmp_path / "logs"], SimulatedDisk(1e12, 40e9).read_usage).find_nearly_full()) == 1


def test_the_folders_to_which_a_run_writes_are_those_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"save_dir": "/data/run"}, "logger": {"log_dir": None}}))
    assert list_written_folders(str(tmp_path / "config.json")) == [Path("/data/run")]
    assert list_written_folders(str(tmp_path / "nowhere")) == []
    (tmp_path / "config.json").write_text("{}")
    assert list_written_folders(str(tmp_path / "config.json")) == []


def test_apprise_sends_the_message_to_each_service() -> None:
    """json:// is the scheme of apprise's own kind of webhook."""
    failed = Notification("r-1", "outcome", "r", 0.0, "run r: failed, node0: boom", {"status": "failed"})
    with receive_webhooks() as first, receive_webhooks() as second:
        urls = [receiver.url.replace("http://", "json://") for receiver in (first, second)]
        build_delivery("apprise", "\n".join(urls).encode())(failed)
        for receiver in (first, second):
            [request] = receiver.accepted
            assert request["path"] == f"/{URL_TOKEN}"
            assert {name: request["body"][name] for name in ("title", "message", "type")} == {
                "title": "swarmtrain: outcome",
                "message": "run r: failed, node0: boom",
                "type": "failure",
            }


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"json://127.0.0.1:9/{URL_TOKEN}", "a service did not accept the message"),
        (f"no-such-service://{URL_TOKEN}", "apprise does not accept URL 1 of the file"),
    ],
)
def test_a_failure_of_apprise_is_described_without_its_url(url: str, reason: str) -> None:
    with pytest.raises(DeliveryError) as raised:
        build_delivery("apprise", url.encode())(build_notification("1"))
    assert str(raised.value) == reason


def test_apprise_that_hangs_is_stopped_and_its_urls_are_in_no_command_line() -> None:
    seen: list[str] = []

    def watch_processes() -> None:
        while not is_over.wait(0.02):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.append(file.read_text(errors="replace"))

    is_over = threading.Event()
    watcher = threading.Thread(target=watch_processes)
    with receive_webhooks() as receiver:
        receiver.delay = 20.0
        watcher.start()
        try:
            with pytest.raises(DeliveryError, match="did not finish in time"):
                send_with_apprise([receiver.url.replace("http://", "json://")], build_notification("1"), 3.0)
        finally:
            is_over.set()
            watcher.join()
    assert any("import apprise" in text for text in seen)
    assert not any(URL_TOKEN in text for text in seen)


def test_a_python_without_apprise_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ChannelGone, match="lacks the package apprise"):
        build_delivery("apprise", b"json://127.0.0.1/")


def write_notified_config(folder: Path, text: str) -> None:
    (folder / "config.yml").write_text(f"runner: {{hosts: [a]}}\n{text}")


def test_the_command_reports_each_channel_and_fails_if_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with receive_webhooks() as good, receive_webhooks() as bad:
        for name, receiver in (("good", good), ("bad", bad)):
            receiver.write_secret(tmp_path / name)
        bad.statuses = [500, 500]
        write_notified_config(tmp_path, "notify: {bad: {secret: bad}, good: {secret: good, events: [disk]}}\n")
        monkeypatch.setattr("sys.argv", ["swarmtrain", "notify-test", "config.yml"])
        assert run_command_line() == 1
        printed = capsys.readouterr()
        assert printed.out == "good: delivered\n"
        assert "error: config notify: bad: HTTP status 500" in printed.err
        assert good.accepted[0]["body"]["type"] == "run.test"

        write_notified_config(tmp_path, "notify: {good: {secret: good}}\n")
        assert run_command_line() == 0
        assert len(set(good.accepted_ids)) == 2

        write_notified_config(tmp_path, "")
        assert run_command_line() == 1
        assert "config notify: has no channels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("notify: {ci: {secret: s, events: [outcomes]}}", "notify.ci.events", "outcomes"),
        ("notify: {ci: {secret: s, events: []}}", "notify.ci.events", "at least one event"),
        ("notify: {ci: {secret: s, type: email}}", "notify.ci.type", "webhook"),
        ("notify: {ci: {}}", "notify.ci.secret", "is required"),
        ("notify: {ci: {secret: s, url: x}}", "notify.ci.url", "known keys: events, secret, type"),
        ("notify: {CI: {secret: s}}", "notify.CI", "'CI' is not a valid name of a channel"),
        ("notify: [ci]", "notify", "must be a mapping"),
    ],
)
def test_an_invalid_channel_is_refused_with_its_place(tmp_path: Path, text: str, place: str, reason: str) -> None:
    write_notified_config(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "config.yml")
    assert place in raised.value.plain_text
    assert reason in raised.value.plain_text


def test_an_internal_network_has_no_route_to_a_channel(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text("runner: {swarm: {internal: true}}\nnotify: {ci: {secret: s}}\n")
    with pytest.raises(ConfigError, match="cannot reach a channel from an internal network"):
        load_config(tmp_path / "config.yml")


class RefusingLauncher:
    """A launcher that records the plan that it gets, and starts nothing."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def list_runs(self) -> list[str]:
        return []

    def deploy_run(self, plan: Plan, report_progress: Callable[[str], None]) -> None:
        self.plans.append(plan)
        raise StackError("refused")

    def tear_down_run(self, run: str, report_progress: Callable[[str], None]) -> None:
        pass


def test_a_probe_of_the_doctor_notifies_nobody() -> None:
    launcher: Any = RefusingLauncher()
    with pytest.raises(StackError, match="refused"):
        run_probe(launcher, plan_notified_run(), lambda _line: None)
    [plan] = launcher.plans
    services = render_stack(plan).document["services"]
    assert "notify" not in json.dumps(services)
    assert [item.name for item in plan.cargo.secrets] == ["TOKEN"]
