"""The dashboard's server, on a real port of this machine: access control, responses, shutdown."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sample_cluster
import sample_run
import uvicorn

from swarmtrain import protocol
from swarmtrain.errors import AmbiguousRun, EngineError, RunNotFound, SwarmtrainError
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.common.history_store import EVENTS_FILE, RecordedRun
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.view.dashboard import html_page
from swarmtrain.view.dashboard.access_policy import AccessPolicy, create_access_policy, is_loopback
from swarmtrain.view.dashboard.cluster_source import ClusterDataSource
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.dashboard.server import create_app

IDENTITY = RunIdentity("aaaaaaaaaaaa")
ALL_INTERFACES = "0.0.0.0"  # noqa: S104  # a page there asks for a token
TOKEN = "a-token-of-a-test"  # noqa: S105  # a test's


@pytest.fixture
def demo() -> RunDataSource:
    """A run that is down, with its stored events and logs."""
    recorded_run = RecordedRun("demo", IDENTITY)
    recorded_run.create_folder()
    (recorded_run.folder / EVENTS_FILE).write_text("".join(f"{event.to_line()}\n" for event in sample_run.build_events(outcome="done")))
    (recorded_run.folder / "node0.log").write_text("2026-11-22T19:08:45.681347946Z [rank 0] hello\n")
    return RunDataSource(recorded_run, None)


@contextmanager
def run_server(source: RunDataSource | ClusterDataSource, *, token: str = "", loopback: bool = True) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            create_app(source, AccessPolicy(token, loopback, port)), log_level="error", access_log=False, lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


def send_request(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_on_loopback_it_is_open_to_this_machine_and_to_no_site_that_leads_here(demo: RunDataSource) -> None:
    with run_server(demo) as port:
        status, headers, body = send_request(port, "/")
        assert (status, b"<title>swarmtrain</title>" in body) == (200, True)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert send_request(port, "/", Host=f"localhost:{port}")[0] == 200
        assert send_request(port, "/", Host=f"[::1]:{port}")[0] == 200
        for stranger in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            assert send_request(port, "/api/page", Host=stranger)[0] == 421, stranger
        for name, kind in html_page.ASSET_TYPES.items():
            status, headers, _ = send_request(port, f"/{name}")
            assert (status, headers["content-type"].partition(";")[0]) == (200, kind)
        assert send_request(port, "/uplot/manifest.json")[0] == 404
        assert send_request(port, "/../server.py")[0] == 404


def test_the_page_is_sent_again_only_if_it_is_another(demo: RunDataSource) -> None:
    with run_server(demo) as port:
        served = json.loads(send_request(port, "/api/page")[2])
        assert (served["page"]["run"], served["page"]["state"]) == ("demo", "done")
        assert send_request(port, f"/api/page?version={served['version']}")[0] == 204
        assert send_request(port, "/api/page?version=other")[0] == 200
        assert len(send_request(port, "/api/page", Accept_Encoding="gzip")[2]) < 200_000
        lines = json.loads(send_request(port, "/api/lines")[2])
        assert ([line["text"] for line in lines["lines"]], lines["last"]) == (["hello"], 1)
        assert json.loads(send_request(port, "/api/lines?after=1")[2]) == {"lines": [], "last": 1}
        for after in ("9" * 5000, "-1", "one", ""):
            assert send_request(port, f"/api/lines?after={after}")[0] == 400
        status, headers, body = send_request(port, "/metrics")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'swarmtrain_run_state{run="demo",state="done"} 1\n' in body


def test_elsewhere_it_requires_the_token(demo: RunDataSource) -> None:
    with run_server(demo, token=TOKEN, loopback=False) as port:
        for path in ("/", "/api/page", "/api/lines", "/metrics", "/page.js", "/?token=", "/?token=wrong", f"/metrics?token={TOKEN}"):
            assert send_request(port, path)[0] == 401, path
        assert send_request(port, "/metrics", Authorization="Bearer wrong")[0] == 401
        assert send_request(port, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = send_request(port, f"/?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert send_request(port, "/api/page", Cookie=cookie.partition(";")[0])[0] == 200
        assert send_request(port, "/api/page", Cookie=f"swarmtrain-{port}=wrong")[0] == 401
        assert send_request(port, "/", Host="a-name-of-this-machine", Authorization=f"Bearer {TOKEN}")[0] == 200


def store_runs() -> None:
    """Store events of all runs of the sample cluster."""
    for run, run_id in sample_cluster.IDS.items():
        recorded_run = RecordedRun(run, RunIdentity(run_id))
        recorded_run.create_folder()
        (recorded_run.folder / EVENTS_FILE).write_text("".join(f"{event.to_line()}\n" for event in sample_run.build_events(outcome="done")))


@pytest.fixture
def backend() -> sample_cluster.FakeBackend:
    store_runs()
    return sample_cluster.FakeBackend()


def test_the_page_of_a_cluster_has_the_pages_of_all_its_runs(backend: sample_cluster.FakeBackend) -> None:
    with run_server(ClusterDataSource(backend)) as port:
        assert b"<h1>Cluster</h1>" in send_request(port, "/")[2]
        served = json.loads(send_request(port, "/api/cluster")[2])
        assert [run["key"] for run in served["page"]["runs"]] == ["baseline", "demo", "urgent", "sweep"]
        assert send_request(port, f"/api/cluster?version={served['version']}")[0] == 204
        for path in ("/runs/demo/", "/runs/demo/page.js", "/runs/demo/uplot/uPlot.js", "/runs/demo/metrics", "/cluster.js", "/page.css"):
            assert send_request(port, path)[0] == 200, path
        assert json.loads(send_request(port, "/runs/demo/api/page")[2])["page"]["run"] == "demo"
        assert json.loads(send_request(port, f"/runs/{sample_cluster.IDS['demo']}/api/page")[2])["page"]["run"] == "demo"
        assert backend.opened == [sample_cluster.IDS["demo"]], "a run is opened once"
        status, headers, body = send_request(port, "/runs/never/api/page")
        assert (status, headers["content-type"]) == (404, "application/json")
        assert json.loads(body) == {
            "error": "run never: unknown run; existing runs: demo",
            "hint": "swarmtrain history lists all known runs",
        }
        assert send_request(port, "/runs/never/api/lines")[0] == 404
        assert send_request(port, "/runs/demo/../../server.py")[0] == 404


def test_one_target_for_prometheus_has_each_sample_once(backend: sample_cluster.FakeBackend) -> None:
    with run_server(ClusterDataSource(backend)) as port:
        status, headers, body = send_request(port, "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = body.decode().splitlines()
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    for run in sample_cluster.IDS:
        assert f'swarmtrain_run_state{{run="{run}",state="done"}} 1' in lines
    assert 'swarmtrain_queue_runs{class="normal",state="preempted"} 1' in lines
    assert 'swarmtrain_machine_gpus_allocated{host="gpu-2"} 3' in lines
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))
    blocks = [name for name, _ in itertools.groupby(sample.partition("{")[0] for sample in samples)]
    assert sorted(blocks) == sorted(typed), "the samples of a metric are together"


def test_every_route_of_a_cluster_requires_the_token(backend: sample_cluster.FakeBackend) -> None:
    paths = (
        "/",
        "/api/cluster",
        "/compare",
        "/api/compare?run=demo&run=sweep",
        "/metrics",
        "/cluster.js",
        "/runs/demo/",
        "/runs/demo/api/page",
        "/runs/demo/api/lines",
        "/runs/demo/metrics",
    )
    with run_server(ClusterDataSource(backend), token=TOKEN, loopback=False) as port:
        for path in paths:
            assert send_request(port, path)[0] == 401, path
            assert send_request(port, path, Authorization=f"Bearer {TOKEN}")[0] == 200, path
        assert send_request(port, f"/runs/demo/?token={TOKEN}")[0] == 401, "only the first page takes the token from its address"
    with run_server(ClusterDataSource(backend)) as port:
        for path in paths:
            assert send_request(port, path, Host="evil.example")[0] == 421, path


def test_a_cluster_that_does_not_answer_keeps_its_page(backend: sample_cluster.FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.dashboard.cluster_source.POLL_SECONDS", -1.0)
    backend.is_away = True
    source = ClusterDataSource(backend)
    with pytest.raises(EngineError):
        source.get_page_data()
    backend.is_away = False
    first = source.get_page_data()
    backend.is_away = True
    assert source.get_page_data() == {**first, "connection_error": "no answer"}
    backend.page = replace(backend.page, runs=(backend.page.runs[0], replace(backend.page.runs[0], id="eeeeeeeeeeee")))
    backend.is_away = False
    assert [run["key"] for run in source.get_page_data()["runs"]] == [sample_cluster.IDS["baseline"], "eeeeeeeeeeee"]
    with pytest.raises(AmbiguousRun, match="several runs have this name: bbbbbbbbbbbb, eeeeeeeeeeee"):
        source.find_run_source("baseline")


def test_which_pages_have_a_token(tmp_path: Path) -> None:
    assert create_access_policy("127.0.0.1", 1, None) == AccessPolicy("", loopback_only=True, port=1)
    assert len(create_access_policy(ALL_INTERFACES, 1, None).token) >= 32
    assert create_access_policy(ALL_INTERFACES, 1, None).token != create_access_policy(ALL_INTERFACES, 1, None).token
    assert [is_loopback(host) for host in ("localhost", "::1", "127.3.2.1", "10.0.0.1", "::", "gpu-1")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert create_access_policy("127.0.0.1", 1, file) == AccessPolicy(TOKEN, loopback_only=True, port=1)
    for bad in ("short", "with a space in the middle", "ümlaut-ümlaut-ümlaut"):
        file.write_text(bad)
        with pytest.raises(SwarmtrainError, match="at least 16"):
            create_access_policy("127.0.0.1", 1, file)
    with pytest.raises(SwarmtrainError, match="cannot be read"):
        create_access_policy("127.0.0.1", 1, tmp_path / "none")


class FlakyLauncher:
    """A launcher whose manager goes away and comes back."""

    is_away = False
    slow: threading.Event | None = None
    identity = IDENTITY

    def read_identity(self, run: str) -> RunIdentity:
        return self.identity

    def read_events(self, run: str, since: float | None = None) -> list[protocol.Event]:
        if self.is_away:
            raise EngineError("no answer")
        if self.slow:
            self.slow.wait(20)
        return [event for event in sample_run.build_events() if event.time >= (since or 0)]

    def list_tasks(self, run: str) -> list[object]:
        return list(sample_run.build_tasks())


def test_a_lost_manager_is_reported_and_what_was_shown_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.dashboard.data_source.POLL_SECONDS", -1.0)
    launcher = FlakyLauncher()
    source = RunDataSource(RecordedRun("demo", IDENTITY), launcher)  # type: ignore[arg-type]  # has what the data source uses of a launcher
    first = source.get_page_data()
    assert first["connection_error"] == ""
    launcher.is_away = True
    assert source.get_page_data()["connection_error"] == "no answer"
    assert source.get_page_data()["curves"] == first["curves"]
    launcher.is_away = False
    again = source.get_page_data()
    assert (again["connection_error"], again["failures"], again["curves"]) == ("", 1, first["curves"])


class TalkingLauncher(FlakyLauncher):
    """A launcher of a run that prints a line every 10 ms."""

    def __init__(self) -> None:
        self.starts: list[float | None] = []
        self.closed = threading.Event()

    def stream_logs(self, run: str, *, follow: bool, tail: int | None, since: float | None) -> Iterator[LogLine]:
        self.starts.append(since)
        try:
            for second in itertools.count(int(since or 1)):
                yield LogLine("node0", "hello", None, float(second))
                time.sleep(0.01)
        finally:
            self.closed.set()


def test_output_that_no_client_requests_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.dashboard.data_source.POLL_SECONDS", 0.0)
    monkeypatch.setattr("swarmtrain.view.dashboard.data_source._FOLLOW_SECONDS", 0.5)
    launcher = TalkingLauncher()
    source = RunDataSource(RecordedRun("demo", IDENTITY), launcher)  # type: ignore[arg-type]  # has what the data source uses of a launcher
    for _ in range(2):
        launcher.closed.clear()
        source.get_output_lines()
        listener = source._listener
        assert listener
        assert launcher.closed.wait(30)
        listener.join(30)
    monkeypatch.setattr(source, "_launcher", None)
    times = [line["time"] for line in source.get_output_lines()[0]]
    assert times == [float(second + 1) for second in range(len(times))], "each line once"
    assert launcher.starts[0] is None
    assert launcher.starts[1] in times[1:-1]


def test_an_opened_run_recovers_with_the_next_launcher_of_its_cluster(
    backend: sample_cluster.FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as after its SSH tunnel was closed."""
    monkeypatch.setattr("swarmtrain.view.dashboard.data_source.POLL_SECONDS", -1.0)
    launchers = FlakyLauncher(), FlakyLauncher()
    source = ClusterDataSource(backend)
    states = []
    for launcher in launchers:
        launcher.identity = RunIdentity(sample_cluster.IDS["demo"])
        backend.launchers[launcher.identity.id] = launcher  # type: ignore[assignment]  # has what the data source uses of a launcher
        states += [source.find_run_source("demo").get_page_data()["connection_error"] for launcher.is_away in (False, True)]
    assert states == ["", "no answer", "", "no answer"]
    assert backend.opened == [sample_cluster.IDS["demo"]]


def test_the_page_of_one_run_does_not_poll_all_launchers(backend: sample_cluster.FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.dashboard.cluster_source.POLL_SECONDS", -1.0)
    source = ClusterDataSource(backend)
    for _ in range(3):
        source.find_run_source("demo")
        source.find_run_source(sample_cluster.IDS["sweep"])
    assert backend.polls == 1
    with pytest.raises(RunNotFound):
        source.find_run_source("never")
    assert backend.polls == 2, "an unknown run may be new"
    monkeypatch.setattr("swarmtrain.view.dashboard.cluster_source._KEY_SECONDS", 0.0)
    source.find_run_source("demo")
    assert backend.polls == 3


def test_in_a_partial_outage_opened_runs_stay_open(backend: sample_cluster.FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.dashboard.cluster_source.POLL_SECONDS", -1.0)
    monkeypatch.setattr("swarmtrain.view.dashboard.cluster_source._KEY_SECONDS", 0.0)
    source = ClusterDataSource(backend)
    demo = source.find_run_source("demo")
    source.find_run_source("sweep")
    complete = backend.page
    backend.page = replace(complete, runs=complete.runs[:1], problems=("no answer",))
    assert source.find_run_source("demo") is source.find_run_source(sample_cluster.IDS["demo"]) is demo
    with pytest.raises(RunNotFound):
        source.find_run_source("urgent")
    monkeypatch.setattr("swarmtrain.view.dashboard.cluster_source._MAX_REMOVED_SOURCES", 1)
    source.find_run_source("baseline")
    backend.page = complete
    assert source.find_run_source("demo") is demo
    backend.page = replace(complete, runs=complete.runs[:1])
    with pytest.raises(RunNotFound):
        source.find_run_source("demo")


def test_the_page_of_a_removed_run_does_not_show_the_next_run_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.dashboard.data_source.POLL_SECONDS", -1.0)
    launcher = FlakyLauncher()
    source = RunDataSource(RecordedRun("demo", IDENTITY), launcher)  # type: ignore[arg-type]  # has what the data source uses of a launcher
    first = source.get_page_data()
    monkeypatch.setattr(launcher, "read_events", lambda run, since=None: sample_run.build_events(outcome="failed"))
    launcher.identity = RunIdentity("bbbbbbbbbbbb")
    second = source.get_page_data()
    assert (second["state"], second["history"], second["curves"]) == ("down", first["history"], first["curves"])
    with pytest.raises(RunNotFound, match="was removed; another run has its name now"):
        RunDataSource(RecordedRun("demo", IDENTITY), launcher).get_page_data()  # type: ignore[arg-type]  # as above


def test_a_manager_that_takes_its_time_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.dashboard.data_source.POLL_SECONDS", -1.0)
    launcher = FlakyLauncher()
    source = RunDataSource(RecordedRun("demo", IDENTITY), launcher)  # type: ignore[arg-type]  # has what the data source uses of a launcher
    first = source.get_page_data()
    launcher.slow = threading.Event()
    waits = threading.Thread(target=source.get_page_data)
    waits.start()
    time.sleep(2)
    assert waits.is_alive()
    assert source.get_page_data() is first
    assert waits.is_alive(), "the second request is answered while the first still waits"
    old = source.compute_data_age()
    assert old >= 2
    launcher.slow.set()
    waits.join(60)
    assert source.compute_data_age() < old


def test_the_command_prints_its_address_and_ends_on_ctrl_c(demo: RunDataSource, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "DOCKER_HOST": f"unix://{tmp_path}/none"}
    argv = [sys.executable, "-m", "swarmtrain", "dashboard", "demo", "--host", ALL_INTERFACES, "--port", "0"]
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()  # type: ignore[union-attr]  # it is a pipe
        port, token = int(line.rsplit(":", 1)[1].partition("/")[0]), line.strip().partition("?token=")[2]
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                assert send_request(port, "/api/page")[0] == 401
                assert send_request(port, "/api/page", Authorization=f"Bearer {token}")[0] == 200
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (out, "Traceback" in err, token in err) == ("", False, False)
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        argv[-4:] = ["--port", str(taken.getsockname()[1])]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "cannot listen on this address: Address already in use\nhint: use --port 0 to choose a free port" in done.stderr


def test_the_report_of_a_run(demo: RunDataSource, tmp_path: Path) -> None:
    html_page.write_html_report([demo], tmp_path / "demo.html", overwrite=False)
    assert '"run":"demo"' in (tmp_path / "demo.html").read_text()
    with pytest.raises(SwarmtrainError, match="already exists"):
        html_page.write_html_report([demo], tmp_path / "demo.html", overwrite=False)
    html_page.write_html_report([demo], tmp_path / "demo.html", overwrite=True)
    with pytest.raises(SwarmtrainError, match="cannot be written: file exists"):
        html_page.write_html_report([demo], tmp_path / "demo.html" / "demo.html", overwrite=False)
    assert not list(tmp_path.glob(".demo*"))


def test_without_the_extra_it_prints_what_to_install(demo: RunDataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    from swarmtrain.view.dashboard.server import serve_dashboard

    with pytest.raises(SwarmtrainError) as raised:
        serve_dashboard(demo, host="127.0.0.1", port=0, token_file=None, open_browser=False)
    assert "pip install 'swarmtrain[dashboard]'" in str(raised.value.hint)
