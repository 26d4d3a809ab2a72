"""Log frames become complete lines, each once; received lines are also stored once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.common.container_logs import ContainerLogLine, LineDeduplicator, _join_log_frames, read_log_lines
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.common.log_recorder import LogRecorder
from swarmtrain.protocol import Event
from swarmtrain.protocol.run_identity import RunIdentity

RECORDED_RUN = RecordedRun("run", RunIdentity("aaaaaaaaaaaa"))
TIMES = [f"2026-11-21T00:25:15.{index:09d}Z" for index in range(1, 10)]


def build_frame(time: str, text: str, *, task: str = "t1", stream: int = 1) -> tuple[int, bytes]:
    details = f"com.docker.swarm.node.id=n,com.docker.swarm.service.id=s,com.docker.swarm.task.id={task}"
    return stream, f"{time} {details} {text}".encode()


def test_a_line_knows_its_time_task_and_rank() -> None:
    (line,) = _join_log_frames([build_frame("2026-11-21T00:25:15.500000000Z", "[rank 12]   loss 3\n")], "node1")
    assert (line.task, line.text) == ("t1", "[rank 12]   loss 3")
    assert line.to_log_line() == LogLine("node1", "  loss 3", 12, 1795220715.5)


def test_a_line_that_no_rank_wrote_is_kept_unchanged() -> None:
    (line,) = _join_log_frames([build_frame(TIMES[0], "[rank x] a  b\n")], "node1")
    assert line.to_log_line().rank is None
    assert line.to_log_line().text == "[rank x] a  b"


def test_pieces_of_a_long_line_are_put_together_though_others_come_between() -> None:
    frames = [
        build_frame(TIMES[0], "aa"),
        build_frame(TIMES[1], "err\n", stream=2),
        build_frame(TIMES[2], "bb"),
        build_frame(TIMES[3], "cc\n"),
        build_frame(TIMES[4], "end"),
    ]
    assert [(line.time, line.text) for line in _join_log_frames(frames, "n")] == [
        (TIMES[1], "err"),
        (TIMES[0], "aabbcc"),
        (TIMES[4], "end"),
    ]


def test_a_message_of_the_engine_in_a_log_is_a_line() -> None:
    (line,) = _join_log_frames([(3, b"warning: incomplete log stream")], "n")
    assert line.text == "warning: incomplete log stream"


def test_a_log_that_is_incomplete_is_reported() -> None:
    class _Engine:
        def open_log_stream(self, *_request: object) -> list[tuple[int, bytes]]:
            return [build_frame(TIMES[0], "here\n"), (3, b"node n1 is not available\n")]

    engine: Any = _Engine()
    messages: list[str] = []
    lines = read_log_lines(engine, "/services/s", "node1", report_problem=messages.append)
    assert [line.text for line in lines] == ["here"]
    assert messages == ["the log of node1 is incomplete: node n1 is not available"]
    assert read_log_lines(engine, "/services/s", "node1") == lines


def test_only_the_coordinator_posts_events() -> None:
    text = Event("progress", {"step": 3}, 1.0).to_line()
    assert ContainerLogLine("node0", TIMES[0], "t", text).parse_event() is None
    assert ContainerLogLine("rendezvous", TIMES[0], "t", text).parse_event() == Event("progress", {"step": 3}, 1.0)


def test_after_a_reconnect_each_line_comes_once() -> None:
    def line(time: int, text: str, task: str = "t1") -> ContainerLogLine:
        return ContainerLogLine("n", TIMES[time], task, text)

    once = LineDeduplicator()
    before = [line(0, "a"), line(1, "b"), line(1, "b"), line(0, "other task", "t2")]
    assert [once.is_new(item) for item in before] == [True, True, True, True]
    once.start_replay()
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


def test_what_was_received_is_written_once_even_by_a_second_watch(isolated_state: Path) -> None:
    event = Event("world", {"world_size": 2}, 1.0).to_line()
    lines = [
        ContainerLogLine("node0", TIMES[0], "t", "one"),
        ContainerLogLine("rendezvous", TIMES[1], "t", event),
        ContainerLogLine("node0", TIMES[2], "t", "two"),
    ]
    for watched in (lines[:2], lines):
        record = LogRecorder(RECORDED_RUN)
        for line in watched:
            record.append_line(line)
        record.close()
    folder = RECORDED_RUN.folder
    assert folder == isolated_state / "swarmtrain" / "run" / "history" / "aaaaaaaaaaaa"
    assert (folder / "node0.log").read_text() == f"{TIMES[0]} one\n{TIMES[2]} two\n"
    assert [json.loads(text)["world_size"] for text in (folder / "events.jsonl").read_text().splitlines()] == [2]


def test_a_state_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    record = LogRecorder(RECORDED_RUN)
    record.append_line(ContainerLogLine("node0", TIMES[0], "t", "one"))
    record.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("address", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:9"])
def test_an_engine_that_is_not_there_is_named_with_the_next_step(address: str) -> None:
    with pytest.raises(EngineError) as raised:
        DockerEngine(address)
    assert raised.value.place == f"Docker engine at {address}"
    assert raised.value.message == "no engine is reachable"
    assert "systemctl start docker" in str(raised.value.hint)
