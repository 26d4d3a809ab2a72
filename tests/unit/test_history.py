"""What is kept of runs on this machine, and what befell them as people read it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from swarmtrain import wire
from swarmtrain.host.log import written_down
from swarmtrain.launchers import kept
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.kept import Keeper
from swarmtrain.launchers.local.folder import RunFolder
from swarmtrain.launchers.local.follow import Log
from swarmtrain.view.history import history, known, runs
from swarmtrain.view.logs import Choice, pattern, show_logs
from swarmtrain.wire import EXIT_PLANNED, Event

FIRST = [
    Event(wire.BOARD_UP, {"run": "demo"}, 100.0),
    Event(wire.JOINED, {"node": "node0", "address": "10.0.0.3", "interface": "eth0"}, 101.0),
    Event(wire.WORLD, {"world_size": 2, "nodes": 2}, 102.0),
    Event(wire.PROGRESS, {"step": 1, "steps": 9}, 103.0),
    Event(wire.USAGE, {"nodes": {}}, 103.5),
    Event(wire.PROGRESS, {"step": 2, "steps": 9}, 104.0),
    Event(wire.LEFT, {"node": "node1", "exit_code": EXIT_PLANNED}, 105.0),
    Event(wire.WORLD, {"world_size": 1, "nodes": 1}, 106.0),
    Event(wire.VERDICT, {"status": "done", "why": "all steps", "exit_code": 0}, 160.0),
]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def stamp(number: int) -> str:
    return f"2026-11-21T00:{number // 60_000:02d}:{number // 1000 % 60:02d}.{number % 1000:03d}000000Z"


def keep(events: list[Event], *, run: str = "demo") -> None:
    keeper = Keeper(run)
    for event in events:
        keeper.add("rendezvous", stamp(int(event.time * 10)), event.to_line(), event=True)
    keeper.close()


def test_what_befell_a_run_has_times_and_reasons() -> None:
    assert str(history("demo", FIRST)).splitlines() == [
        "1970-01-01 00:01:40  its notice board is up",
        "1970-01-01 00:01:41  node0 is here, at 10.0.0.3 by eth0",
        "1970-01-01 00:01:42  world 1: a world of 2 ranks on 2 nodes has formed",
        "1970-01-01 00:01:44  step 2/9",
        "1970-01-01 00:01:45  node1 has left, as it was told to",
        "1970-01-01 00:01:46  world 2: a world of 1 rank on 1 node has formed, since node1 was told to leave",
        "1970-01-01 00:02:40  done: all steps",
    ]


def test_a_run_that_came_up_again_after_its_removal_is_another_life_of_it() -> None:
    keep(FIRST)
    kept.mark("demo", "down")
    assert kept.last_life(kept.events("demo")) == FIRST
    assert kept.since_down(kept.events("demo")) == []
    later = [Event(wire.BOARD_UP, {"run": "demo"}, 500.0)]
    keep(later)
    assert kept.last_life(kept.events("demo")) == later
    assert kept.merged(kept.since_down(kept.events("demo")), later) == later


def test_the_list_of_runs_has_verdict_and_duration() -> None:
    live = known("other", [Event(wire.BOARD_UP, {}, 50.0), Event(wire.PROGRESS, {"step": 7}, 60.0)], "training", 170.0)
    assert str(runs([known("demo", FIRST, None, 10_000.0), live])).splitlines() == [
        "RUN    STARTED              FOR         STEP  STATE",
        "other  1970-01-01 00:00:50  2 min 00 s  7     training",
        "demo   1970-01-01 00:01:40  1 min 00 s  2     done      all steps",
    ]
    assert known("demo", FIRST[:-1], None, 10_000.0).state == "down"


def test_two_that_follow_a_run_keep_each_line_once_and_files_stay_small() -> None:
    first, second = Keeper("demo", limit=3000), Keeper("demo", limit=3000)
    for number in range(200):
        for keeper in (first, second):
            keeper.add("node0", stamp(number), f"[rank 1] line {number}")
            keeper.flush()
    first.close()
    for number in range(190, 210):
        second.add("node0", stamp(number), f"[rank 1] line {number}")
    second.close()
    found = list(kept.lines("demo"))
    assert [int(line.text.split()[1]) for line in found] == list(range(210 - len(found), 210))
    assert len(found) > 40
    assert sum(file.stat().st_size for file in kept.directory("demo").iterdir()) < 7000


def test_the_output_of_a_run_that_is_down_is_what_was_kept(own_state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keeper = Keeper("demo")
    for number in range(6):
        keeper.add(f"node{number % 2}", stamp(number), f"[rank {number % 2}] step {number}")
    keeper.close()
    show_logs("demo", Choice(), follow=False)
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"node{number % 2} rank {number % 2} | step {number}" for number in range(6)]
    assert err == f"no engine answers; this is what was kept of its output in {kept.directory('demo')}\n".replace(
        "no engine", f"Docker engine at unix://{own_state.parent}/docker.sock: no engine"
    )
    since = next(kept.lines("demo")).time
    for choice, steps in (
        (Choice(tail=1), [4, 5]),
        (Choice(node="node1", tail=2), [3, 5]),
        (Choice(rank=0), [0, 2, 4]),
        (Choice(pattern=pattern("[123]$")), [1, 2, 3]),
        (Choice(since=since + 1), []),
    ):
        show_logs("demo", choice, follow=False)
        assert [int(line.split()[-1]) for line in capsys.readouterr().out.splitlines()] == steps


def test_a_choice_of_lines() -> None:
    assert LogLine("node0", "loss 3", 1) in Choice(rank=1, pattern=pattern(r"loss \d"))
    assert LogLine("node0", "loss x", 1) not in Choice(rank=1, pattern=pattern(r"loss \d"))
    assert LogLine("node0", "loss 3") not in Choice(rank=1)


def test_what_a_local_run_printed_in_a_life_before_is_not_taken_for_its_own() -> None:
    folder = RunFolder("demo")
    folder.path.mkdir(parents=True)
    for life in ("first", "second", "third"):
        folder.put_old_events_aside()
        folder.events.write_text(Event(wire.BOARD_UP, {"run": life}, 1.0).to_line() + "\n")
        folder.log("node0").write_text(f"[rank 0] {life}\n")
    assert [event.data["run"] for event in kept.events("demo")] == ["first", "second", "third"]
    assert [line.text for line in kept.lines("demo")] == ["first", "second", "third"]
    assert list(kept.lines("demo", newest=True)) == [LogLine("node0", "third", 0)]


def test_what_is_printed_is_written_down_with_its_time() -> None:
    path = RunFolder("demo").log("node0")
    path.parent.mkdir(parents=True)
    begun = time.time()
    script = "echo '[rank 1] one'; printf 'in two'; sleep 0.3; echo ' parts'; echo err >&2; printf end"
    with written_down(path) as log:
        subprocess.run(["sh", "-c", script], stdout=log, stderr=log, check=True)
    found = list(kept.lines("demo"))
    assert [(line.rank, line.text) for line in found] == [(1, "one"), (None, "in two parts"), (None, "err"), (None, "end")]
    assert begun < found[0].time < found[1].time - 0.2
    assert found[-1].time < time.time()
    assert Log("node0", path).log_lines() == found


def test_what_a_process_leaves_behind_is_heard_and_not_waited_for() -> None:
    path = RunFolder("demo").log("node0")
    path.parent.mkdir(parents=True)
    go = path.with_name("go")
    with written_down(path) as log:
        subprocess.run(["sh", "-c", f"(until [ -e {go} ]; do sleep 0.05; done; echo late) & echo early"], stdout=log, check=True)
    assert [line.text for line in kept.lines("demo")] == ["early"]
    begun = time.monotonic()
    go.touch()
    while len(list(kept.lines("demo"))) < 2:
        assert time.monotonic() - begun < 20
        time.sleep(0.05)


def test_events_of_a_file_are_parsed_from_a_time_on() -> None:
    events = [Event("progress", {"step": step, "time_left": 5}, 100.0 + step) for step in range(5)]
    lines = [event.to_line() for event in events]
    others = ["", "no event", '{"event"', '{"event": "progress", "time": 200.5', '{"event": 7, "time": "never"}', '{"event": "x"}']
    assert list(kept.events_in([*lines, *others])) == events
    assert list(kept.events_in([*others, *lines], 102.0)) == events[2:]
