"""Log frames as whole lines, each once; what was seen is kept once too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.kept import directory
from swarmtrain.launchers.logs import Line, Once, _lines
from swarmtrain.launchers.record import Record
from swarmtrain.wire import Event

TIMES = [f"2026-11-21T00:25:15.{index:09d}Z" for index in range(1, 10)]


def frame(time: str, text: str, *, task: str = "t1", stream: int = 1) -> tuple[int, bytes]:
    details = f"com.docker.swarm.node.id=n,com.docker.swarm.service.id=s,com.docker.swarm.task.id={task}"
    return stream, f"{time} {details} {text}".encode()


def test_a_line_knows_its_time_task_and_rank() -> None:
    (line,) = _lines([frame("2026-11-21T00:25:15.500000000Z", "[rank 12]   loss 3\n")], "node1")
    assert (line.task, line.text) == ("t1", "[rank 12]   loss 3")
    assert line.log_line() == LogLine("node1", "  loss 3", 12, 1795220715.5)


def test_a_line_that_no_rank_wrote_is_kept_whole() -> None:
    (line,) = _lines([frame(TIMES[0], "[rank x] a  b\n")], "node1")
    assert line.log_line().rank is None
    assert line.log_line().text == "[rank x] a  b"


def test_pieces_of_a_long_line_are_put_together_though_others_come_between() -> None:
    frames = [
        frame(TIMES[0], "aa"),
        frame(TIMES[1], "err\n", stream=2),
        frame(TIMES[2], "bb"),
        frame(TIMES[3], "cc\n"),
        frame(TIMES[4], "end"),
    ]
    assert [(line.time, line.text) for line in _lines(frames, "n")] == [(TIMES[1], "err"), (TIMES[0], "aabbcc"), (TIMES[4], "end")]


def test_what_the_engine_itself_says_in_a_log_is_a_line() -> None:
    (line,) = _lines([(3, b"warning: incomplete log stream")], "n")
    assert line.text == "warning: incomplete log stream"


def test_only_the_board_posts_events() -> None:
    text = Event("progress", {"step": 3}, 1.0).to_line()
    assert Line("node0", TIMES[0], "t", text).event() is None
    assert Line("rendezvous", TIMES[0], "t", text).event() == Event("progress", {"step": 3}, 1.0)


def test_after_a_reconnect_each_line_comes_once() -> None:
    def line(time: int, text: str, task: str = "t1") -> Line:
        return Line("n", TIMES[time], task, text)

    once = Once()
    before = [line(0, "a"), line(1, "b"), line(1, "b"), line(0, "other task", "t2")]
    assert [once.is_new(item) for item in before] == [True, True, True, True]
    once.again()
    after = [
        line(0, "a"),
        line(1, "b"),
        line(1, "b"),
        line(1, "b"),
        line(1, "c"),
        line(2, "d"),
        line(0, "other task", "t2"),
        line(3, "e", "t2"),
    ]
    assert [once.is_new(item) for item in after] == [False, False, False, True, True, True, False, True]


def test_what_was_seen_is_written_once_even_by_a_second_watch(own_state: Path) -> None:
    event = Event("world", {"world_size": 2}, 1.0).to_line()
    lines = [Line("node0", TIMES[0], "t", "one"), Line("rendezvous", TIMES[1], "t", event), Line("node0", TIMES[2], "t", "two")]
    for watched in (lines[:2], lines):
        record = Record("run")
        for line in watched:
            record.add(line)
        record.close()
    folder = directory("run")
    assert folder == own_state / "swarmtrain" / "run"
    assert (folder / "node0.log").read_text() == f"{TIMES[0]} one\n{TIMES[2]} two\n"
    assert [json.loads(text)["world_size"] for text in (folder / "events.jsonl").read_text().splitlines()] == [2]


def test_a_state_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    record = Record("run")
    record.add(Line("node0", TIMES[0], "t", "one"))
    record.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("address", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:9"])
def test_an_engine_that_is_not_there_is_named_with_the_next_step(address: str) -> None:
    with pytest.raises(EngineError) as raised:
        Engine(address)
    assert raised.value.place == f"Docker engine at {address}"
    assert raised.value.message == "no engine answers"
    assert "systemctl start docker" in str(raised.value.hint)
