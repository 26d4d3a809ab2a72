"""The records of runs on this machine, and their printed history."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from swarmtrain import protocol
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.common import history_store
from swarmtrain.launchers.common.history_store import (
    RecordedRun,
    build_operation_event,
    find_recorded_run,
    list_continued_runs,
    resolve_run_folder,
)
from swarmtrain.launchers.common.local_run_folder import LocalRunFolder
from swarmtrain.launchers.common.log_recorder import HistoryWriter
from swarmtrain.protocol import EXIT_PLANNED, Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.remote.timestamped_log import open_timestamped_log
from swarmtrain.view.history import build_history, build_run_list, merge_continued_runs, summarize_run
from swarmtrain.view.logs import LogFilter, compile_pattern, print_logs
from swarmtrain.view.run_state import summarize_past_run
from swarmtrain.view.worlds import count_restarts

IDENTITY = RunIdentity("aaaaaaaaaaaa", "alice", "login1", 90.0)
LATER_IDENTITY = RunIdentity("bbbbbbbbbbbb", "bob", "laptop", 490.0)
DEMO = RecordedRun("demo", IDENTITY)
FIRST_EVENTS = [
    Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 100.0),
    Event(protocol.EVENT_NODE_JOINED, {"node": "node0", "address": "10.0.0.3", "interface": "eth0"}, 101.0),
    Event(protocol.EVENT_WORLD_FORMED, {"world_size": 2, "nodes": 2}, 102.0),
    Event(protocol.EVENT_PROGRESS, {"step": 1, "steps": 9}, 103.0),
    Event(protocol.EVENT_USAGE, {"nodes": {}}, 103.5),
    Event(protocol.EVENT_PROGRESS, {"step": 2, "steps": 9}, 104.0),
    Event(protocol.EVENT_NODE_LEFT, {"node": "node1", "exit_code": EXIT_PLANNED}, 105.0),
    Event(protocol.EVENT_WORLD_FORMED, {"world_size": 1, "nodes": 1}, 106.0),
    Event(protocol.EVENT_OUTCOME, {"status": "done", "reason": "all steps", "exit_code": 0}, 160.0),
]


@pytest.fixture(autouse=True)
def _isolate_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def format_timestamp(number: int) -> str:
    return f"2026-11-21T00:{number // 60_000:02d}:{number // 1000 % 60:02d}.{number % 1000:03d}000000Z"


def store_events(events: list[Event], *, run: RecordedRun = DEMO) -> None:
    keeper = HistoryWriter(run)
    for event in events:
        keeper.append_line("rendezvous", format_timestamp(int(event.time * 10)), event.to_line(), is_event=True)
    keeper.close()


def test_the_history_of_a_run_has_times_and_reasons() -> None:
    assert str(build_history("demo", IDENTITY, FIRST_EVENTS)).splitlines() == [
        "1970-01-01 00:01:40  its coordinator is up",
        "1970-01-01 00:01:41  node0 joined, at 10.0.0.3 on interface eth0",
        "1970-01-01 00:01:42  world 1: a world of 2 ranks on 2 nodes has formed",
        "1970-01-01 00:01:44  step 2/9",
        "1970-01-01 00:01:45  node1 has exited, as requested",
        "1970-01-01 00:01:46  world 2: a world of 1 rank on 1 node has formed, since node1 received a stop request",
        "1970-01-01 00:02:40  done: all steps",
    ]


def test_a_run_that_is_deployed_again_after_its_removal_is_a_new_run() -> None:
    store_events(FIRST_EVENTS)
    DEMO.record_operation(build_operation_event("down"))
    later, later_events = RecordedRun("demo", LATER_IDENTITY), [Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 500.0)]
    store_events(later_events, run=later)
    assert (DEMO.load_events()[:-1], later.load_events()) == (FIRST_EVENTS, later_events)
    assert (find_recorded_run("demo"), find_recorded_run(IDENTITY.id), find_recorded_run("other")) == (later, DEMO, None)
    assert list_continued_runs(later) == [later]


def test_a_run_that_resumes_the_checkpoints_of_a_removed_run_continues_it() -> None:
    store_events(FIRST_EVENTS)
    later, unrelated = RecordedRun("demo", LATER_IDENTITY), RecordedRun("demo", RunIdentity("cccccccccccc"))
    resumption = Event(protocol.EVENT_RESUMED, {"step": 2, "path": "/save/step-2", "run_id": IDENTITY.id}, 501.0)
    store_events([Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 500.0), resumption], run=later)
    store_events([Event(protocol.EVENT_COORDINATOR_STARTED, {"run": "demo"}, 900.0)], run=unrelated)
    assert list_continued_runs(later) == [DEMO, later]
    assert list_continued_runs(unrelated) == [unrelated]
    summaries = [summary for run in (DEMO, later, unrelated) if (summary := summarize_past_run(run))]
    merged = merge_continued_runs(summaries)
    assert [(summary.id, summary.owner, summary.started, summary.seconds, summary.step) for summary in merged] == [
        (IDENTITY.id, "bob", 100.0, 61.0, 2),
        ("cccccccccccc", "", 900.0, 0.0, None),
    ]


def test_the_list_of_runs_has_outcome_and_duration() -> None:
    live = summarize_run(
        "other",
        LATER_IDENTITY,
        [Event(protocol.EVENT_COORDINATOR_STARTED, {}, 50.0), Event(protocol.EVENT_PROGRESS, {"step": 7}, 60.0)],
        "training",
        170.0,
    )
    assert str(build_run_list([summarize_run("demo", IDENTITY, FIRST_EVENTS, None, 10_000.0), live])).splitlines() == [
        "RUN    ID            OWNER  STARTED              FOR         STEP  STATE",
        "other  bbbbbbbbbbbb  bob    1970-01-01 00:00:50  2 min 00 s  7     training",
        "demo   aaaaaaaaaaaa  alice  1970-01-01 00:01:40  1 min 00 s  2     done      all steps",
    ]
    assert summarize_run("demo", IDENTITY, FIRST_EVENTS[:-1], None, 10_000.0).state == "down"


def test_two_followers_of_a_run_store_each_line_once_and_files_stay_small() -> None:
    first, second = HistoryWriter(DEMO, max_file_bytes=3000), HistoryWriter(DEMO, max_file_bytes=3000)
    for number in range(200):
        for keeper in (first, second):
            keeper.append_line("node0", format_timestamp(number), f"[rank 1] line {number}")
            keeper.flush()
    first.close()
    for number in range(190, 210):
        second.append_line("node0", format_timestamp(number), f"[rank 1] line {number}")
    second.close()
    found = list(DEMO.load_log_lines())
    assert [int(line.text.split()[1]) for line in found] == list(range(210 - len(found), 210))
    assert len(found) > 40
    assert sum(file.stat().st_size for file in DEMO.folder.iterdir()) < 7000


def test_the_output_of_a_run_that_is_down_is_what_was_stored(isolated_state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keeper = HistoryWriter(DEMO)
    for number in range(6):
        keeper.append_line(f"node{number % 2}", format_timestamp(number), f"[rank {number % 2}] step {number}")
    keeper.close()
    print_logs("demo", LogFilter(), follow=False)
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"node{number % 2} rank {number % 2} | step {number}" for number in range(6)]
    assert err == f"no engine is reachable; showing its saved output from {DEMO.folder}\n".replace(
        "no engine", f"Docker engine at unix://{isolated_state.parent}/docker.sock: no engine"
    )
    since = next(DEMO.load_log_lines()).time
    for log_filter, steps in (
        (LogFilter(tail=1), [4, 5]),
        (LogFilter(node="node1", tail=2), [3, 5]),
        (LogFilter(rank=0), [0, 2, 4]),
        (LogFilter(pattern=compile_pattern("[123]$")), [1, 2, 3]),
        (LogFilter(since=since + 1), []),
    ):
        print_logs("demo", log_filter, follow=False)
        assert [int(line.split()[-1]) for line in capsys.readouterr().out.splitlines()] == steps


def test_lines_are_filtered() -> None:
    assert LogLine("node0", "loss 3", 1) in LogFilter(rank=1, pattern=compile_pattern(r"loss \d"))
    assert LogLine("node0", "loss x", 1) not in LogFilter(rank=1, pattern=compile_pattern(r"loss \d"))
    assert LogLine("node0", "loss 3") not in LogFilter(rank=1)


def test_what_an_earlier_local_run_of_the_same_name_printed_is_not_shown() -> None:
    folder = LocalRunFolder(resolve_run_folder("demo"))
    DEMO.create_folder()
    (folder.path / "local.json").write_text(json.dumps({"identity": asdict(IDENTITY)}))
    for life in ("first", "second", "third"):
        folder.rotate_events()
        folder.events_path.write_text(Event(protocol.EVENT_COORDINATOR_STARTED, {"run": life}, 1.0).to_line() + "\n")
        folder.get_log_path("node0").write_text(f"[rank 0] {life}\n")
    assert [event.data["run"] for event in DEMO.load_events()] == ["first", "second", "third"]
    assert [line.text for line in DEMO.load_log_lines()] == ["first", "second", "third"]
    assert list(DEMO.load_log_lines(newest_only=True)) == [LogLine("node0", "third", 0)]


def test_what_is_printed_is_stored_with_its_time() -> None:
    path = DEMO.folder / "node0.log"
    path.parent.mkdir(parents=True)
    begun = time.time()
    script = "echo '[rank 1] one'; printf 'in two'; sleep 0.3; echo ' parts'; echo err >&2; printf end"
    with open_timestamped_log(path) as log:
        subprocess.run(["sh", "-c", script], stdout=log, stderr=log, check=True)
    found = list(DEMO.load_log_lines())
    assert [(line.rank, line.text) for line in found] == [(1, "one"), (None, "in two parts"), (None, "err"), (None, "end")]
    assert begun < found[0].time < found[1].time - 0.2
    assert found[-1].time < time.time()


def test_the_output_of_a_processs_orphans_is_read_and_not_waited_for() -> None:
    path = DEMO.folder / "node0.log"
    path.parent.mkdir(parents=True)
    go = path.with_name("go")
    with open_timestamped_log(path) as log:
        subprocess.run(["sh", "-c", f"(until [ -e {go} ]; do sleep 0.05; done; echo late) & echo early"], stdout=log, check=True)
    assert [line.text for line in DEMO.load_log_lines()] == ["early"]
    begun = time.monotonic()
    go.touch()
    while len(list(DEMO.load_log_lines())) < 2:
        assert time.monotonic() - begun < 20
        time.sleep(0.05)


def test_events_of_a_file_are_parsed_from_a_time_on() -> None:
    events = [Event("progress", {"step": step, "time_left": 5}, 100.0 + step) for step in range(5)]
    lines = [event.to_line() for event in events]
    others = ["", "no event", '{"event"', '{"event": "progress", "time": 200.5', '{"event": 7, "time": "never"}', '{"event": "x"}']
    assert list(history_store.parse_events([*lines, *others])) == events
    assert list(history_store.parse_events([*others, *lines], 102.0)) == events[2:]


def test_the_summary_of_a_past_run_is_stored_and_used_until_its_events_change(monkeypatch: pytest.MonkeyPatch) -> None:
    store_events(FIRST_EVENTS)
    DEMO.record_operation(build_operation_event("down"))
    summary = summarize_past_run(DEMO)
    assert summary is not None
    assert (summary.state, summary.step, summary.seconds) == ("done", 2, 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(RecordedRun, "load_events", pytest.fail)
        assert summarize_past_run(DEMO) == summary
    store_events([Event(protocol.EVENT_PROGRESS, {"step": 7, "steps": 9}, 300.0)])
    assert (changed := summarize_past_run(DEMO)) is not None
    assert changed.step == 7


def test_a_damaged_summary_is_made_again() -> None:
    store_events(FIRST_EVENTS)
    summary = summarize_past_run(DEMO)
    for text in ("", "[]", '{"source": 1}'):
        (DEMO.folder / "summary.json").write_text(text)
        assert summarize_past_run(DEMO) == summary


def test_restarts_are_worlds_and_not_failures() -> None:
    def fail(time: float, node: str, error: str) -> Event:
        return Event(protocol.EVENT_FAILURE, {"node": node, "rank": 0, "exit_code": 1, "error": error}, time)

    def form(time: float) -> Event:
        return Event(protocol.EVENT_WORLD_FORMED, {"world_size": 2, "nodes": 2}, time)

    events = [
        form(1.0),
        fail(2.0, "node0", "first"),
        fail(2.1, "node0", "second"),
        form(3.0),
        fail(4.0, "node1", "third"),
        form(5.0),
        fail(6.0, "node0", "the last failure ends the run"),
        Event(protocol.EVENT_OUTCOME, {"status": "failed", "reason": "too many restarts", "exit_code": 1}, 7.0),
    ]
    counts = count_restarts(events)
    assert {node: (restarts.count, restarts.reason) for node, restarts in counts.items()} == {"node0": (1, "second"), "node1": (1, "third")}


def test_the_main_events_give_the_same_history() -> None:
    usage = [Event(protocol.EVENT_USAGE, {"nodes": {}}, 107.0), Event(protocol.EVENT_USAGE, {"nodes": {}}, 108.0)]
    progress = [Event(protocol.EVENT_PROGRESS, {"step": step, "steps": 9}, 106.0 + step / 10) for step in range(3, 9)]
    last = Event(protocol.EVENT_PROGRESS, {"step": 9, "steps": 9}, 109.0)
    events = sorted([*FIRST_EVENTS[:-1], *usage, *progress, last, FIRST_EVENTS[-1]], key=lambda event: event.time)
    store_events(events)
    main_events = DEMO.load_main_events()
    assert len(main_events) < len(events) - 8
    assert (
        build_history("demo", IDENTITY, main_events)
        == build_history("demo", IDENTITY, events)
        == build_history("demo", IDENTITY, DEMO.load_events())
    )
