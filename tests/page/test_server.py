"""The dashboard's server, for real, on a port of this machine: who is let in, what it answers, how it ends."""

from __future__ import annotations

import http.client
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
from pathlib import Path

import made
import pytest
import uvicorn

from swarmtrain import wire
from swarmtrain.errors import EngineError, SwarmtrainError
from swarmtrain.launchers import kept
from swarmtrain.view.page import files
from swarmtrain.view.page.guard import Guard, guard, is_loopback
from swarmtrain.view.page.server import application
from swarmtrain.view.page.source import Source

EVERYWHERE = "0.0.0.0"  # noqa: S104  # a page there asks for a token
TOKEN = "a-token-of-a-test"  # noqa: S105  # a test's


@pytest.fixture
def demo() -> Source:
    """A run that is down, with what was kept of it."""
    folder = kept.directory("demo")
    folder.mkdir(parents=True)
    (folder / kept.EVENTS).write_text("".join(f"{event.to_line()}\n" for event in made.told(end="done")))
    (folder / "node0.log").write_text("2026-11-22T19:08:45.681347946Z [rank 0] hello\n")
    return Source("demo", None)


@contextmanager
def served(source: Source, *, token: str = "", loopback: bool = True) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = uvicorn.Config(application(source, Guard(token, loopback, port)), log_level="error", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


def ask(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_on_loopback_it_is_open_to_this_machine_and_to_no_site_that_leads_here(demo: Source) -> None:
    with served(demo) as port:
        status, headers, body = ask(port, "/")
        assert (status, b"<title>swarmtrain</title>" in body) == (200, True)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert ask(port, "/", Host=f"localhost:{port}")[0] == 200
        assert ask(port, "/", Host=f"[::1]:{port}")[0] == 200
        for stranger in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            assert ask(port, "/api/page", Host=stranger)[0] == 421, stranger
        for name, kind in files.TYPES.items():
            status, headers, _ = ask(port, f"/{name}")
            assert (status, headers["content-type"].partition(";")[0]) == (200, kind)
        assert ask(port, "/uplot/manifest.json")[0] == 404
        assert ask(port, "/../server.py")[0] == 404


def test_the_page_is_sent_again_only_if_it_is_another(demo: Source) -> None:
    with served(demo) as port:
        told = json.loads(ask(port, "/api/page")[2])
        assert (told["page"]["run"], told["page"]["state"]) == ("demo", "done")
        assert ask(port, f"/api/page?have={told['version']}")[0] == 204
        assert ask(port, "/api/page?have=other")[0] == 200
        assert len(ask(port, "/api/page", Accept_Encoding="gzip")[2]) < 200_000
        lines = json.loads(ask(port, "/api/lines")[2])
        assert ([line["text"] for line in lines["lines"]], lines["last"]) == (["hello"], 1)
        assert json.loads(ask(port, "/api/lines?after=1")[2]) == {"lines": [], "last": 1}
        status, headers, body = ask(port, "/metrics")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'swarmtrain_run_state{run="demo",state="done"} 1\n' in body


def test_elsewhere_it_asks_for_the_token(demo: Source) -> None:
    with served(demo, token=TOKEN, loopback=False) as port:
        for path in ("/", "/api/page", "/api/lines", "/metrics", "/page.js", "/?token=", "/?token=wrong", f"/metrics?token={TOKEN}"):
            assert ask(port, path)[0] == 401, path
        assert ask(port, "/metrics", Authorization="Bearer wrong")[0] == 401
        assert ask(port, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = ask(port, f"/?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert ask(port, "/api/page", Cookie=cookie.partition(";")[0])[0] == 200
        assert ask(port, "/api/page", Cookie=f"swarmtrain-{port}=wrong")[0] == 401
        assert ask(port, "/", Host="a-name-of-this-machine", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_which_pages_have_a_token(tmp_path: Path) -> None:
    assert guard("127.0.0.1", 1, None) == Guard("", loopback=True, port=1)
    assert len(guard(EVERYWHERE, 1, None).token) >= 32
    assert guard(EVERYWHERE, 1, None).token != guard(EVERYWHERE, 1, None).token
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
    assert guard("127.0.0.1", 1, file) == Guard(TOKEN, loopback=True, port=1)
    for bad in ("short", "with a space in the middle", "ümlaut-ümlaut-ümlaut"):
        file.write_text(bad)
        with pytest.raises(SwarmtrainError, match="at least 16"):
            guard("127.0.0.1", 1, file)
    with pytest.raises(SwarmtrainError, match="cannot be read"):
        guard("127.0.0.1", 1, tmp_path / "none")


class Flaky:
    """A place of a run whose manager goes away and comes back."""

    away = False
    slow: threading.Event | None = None

    def events(self, run: str, since: float | None = None) -> list[wire.Event]:
        if self.away:
            raise EngineError("no answer")
        if self.slow:
            self.slow.wait(20)
        return [event for event in made.told() if event.time >= (since or 0)]

    def tasks(self, run: str) -> list[object]:
        return list(made.tasks())


def test_a_manager_that_is_away_is_told_and_what_was_seen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.page.source.EVERY", -1.0)
    place = Flaky()
    source = Source("demo", place)  # type: ignore[arg-type]  # what a page asks of a place
    first = source.page()
    assert first["lost"] == ""
    place.away = True
    assert source.page()["lost"] == "no answer"
    assert source.page()["curves"] == first["curves"]
    place.away = False
    again = source.page()
    assert (again["lost"], again["failures"], again["curves"]) == ("", 1, first["curves"])


def test_a_manager_that_takes_its_time_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.view.page.source.EVERY", -1.0)
    place = Flaky()
    source = Source("demo", place)  # type: ignore[arg-type]  # what a page asks of a place
    first = source.page()
    place.slow = threading.Event()
    waits = threading.Thread(target=source.page)
    waits.start()
    time.sleep(2)
    assert waits.is_alive()
    assert source.page() is first
    assert waits.is_alive(), "the second request is answered while the first still waits"
    old = source.age()
    assert old >= 2
    place.slow.set()
    waits.join(60)
    assert source.age() < old


def test_the_command_prints_its_address_and_ends_on_ctrl_c(demo: Source, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "DOCKER_HOST": f"unix://{tmp_path}/none"}
    argv = [sys.executable, "-m", "swarmtrain", "dashboard", "demo", "--host", EVERYWHERE, "--port", "0"]
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()  # type: ignore[union-attr]  # it is a pipe
        port, token = int(line.rsplit(":", 1)[1].partition("/")[0]), line.strip().partition("?token=")[2]
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                assert ask(port, "/api/page")[0] == 401
                assert ask(port, "/api/page", Authorization=f"Bearer {token}")[0] == 200
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
    assert "cannot listen there: Address already in use\nhint: --port 0 takes a free one" in done.stderr


def test_the_report_of_a_run(demo: Source, tmp_path: Path) -> None:
    files.write(demo, tmp_path / "demo.html")
    assert '"run":"demo"' in (tmp_path / "demo.html").read_text()
    with pytest.raises(SwarmtrainError, match="cannot be written"):
        files.write(demo, tmp_path / "none" / "demo.html")


def test_without_the_extra_it_says_what_to_install(demo: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    from swarmtrain.view.page.server import serve

    with pytest.raises(SwarmtrainError) as raised:
        serve(demo, host="127.0.0.1", port=0, token_file=None, open_it=False)
    assert "pip install 'swarmtrain[dashboard]'" in str(raised.value.hint)
