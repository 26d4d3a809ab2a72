"""Events → what a page shows: curves with each step once, marks where it was started anew, nodes, links, facts; and no more than that."""

from __future__ import annotations

import hashlib
import json
import math
import re
from importlib.resources import files as resources
from pathlib import Path

import made
import pytest

from swarmtrain import wire
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers import kept
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.view.history import history
from swarmtrain.view.page import files, prometheus
from swarmtrain.view.page.curves import MOST, Curve, Curves
from swarmtrain.view.page.data import Data, line_data, markers, page_of
from swarmtrain.view.page.data import page as made_page
from swarmtrain.view.page.source import source
from swarmtrain.view.page.story import Story, Told
from swarmtrain.view.status import status
from swarmtrain.wire import Event


def progress(step: int, **values: object) -> Event:
    return Event(wire.PROGRESS, {"step": step, **values}, 100.0 + step)


def world(nodes: int, at: float) -> Event:
    return Event(wire.WORLD, {"world_size": nodes, "nodes": nodes}, at)


def curve(events: list[Event], name: str = "loss") -> dict[int, float]:
    curves = Curves()
    for event in events:
        curves.add(event)
    points = curves.thin()[name]
    assert points["steps"] == sorted(set(points["steps"]))
    return dict(zip(points["steps"], points["values"], strict=True))


def test_of_each_step_the_newest_value_counts() -> None:
    told = [progress(1, loss=5.0), progress(2, loss=4.0), progress(2, loss=4.5), progress(1, loss=5.0), progress(3, loss=3.0)]
    assert curve(told) == {1: 5.0, 2: 4.5, 3: 3.0}


def test_what_a_checkpoint_does_not_hold_is_taken_back() -> None:
    before = [world(2, 1), *(progress(step, loss=10.0 - step) for step in (2, 4, 6))]
    held_out = [Event(wire.EVALUATION, {"step": 6, "loss": 9.0}, 107.0)]
    resumed = [world(2, 108), Event(wire.RESUMED, {"step": 4}, 109.0)]
    assert curve([*before, *resumed, progress(5, loss=1.0)]) == {2: 8.0, 4: 6.0, 5: 1.0}
    assert "held_out" not in _names([*before, *held_out, *resumed])


def test_a_script_that_begins_again_without_a_word_does_so() -> None:
    before = [world(2, 1), *(progress(step, loss=10.0 - step) for step in (2, 4, 6))]
    assert curve([*before, world(2, 108), progress(3, loss=1.0)]) == {2: 8.0, 3: 1.0}
    assert curve([*before, world(2, 108), progress(7, loss=1.0)]) == {2: 8.0, 4: 6.0, 6: 4.0, 7: 1.0}


def test_what_is_no_number_is_a_gap() -> None:
    assert curve([progress(1, loss=2.0), progress(2, loss=math.nan), progress(3, loss=None)]) == {1: 2.0, 2: None, 3: None}
    assert _names([progress(1, loss=None, mfu=None)]) == set()


def test_groups_have_names_of_their_own() -> None:
    told = progress(1, parts={"data": 0.1}, memory={"peak": 5}, metrics={"accuracy": 0.5}, other={"x": 1})
    assert _names([told]) == {"part.data", "memory.peak", "metric.accuracy"}


def _names(events: list[Event]) -> set[str]:
    curves = Curves()
    for event in events:
        curves.add(event)
    return set(curves.thin())


def test_a_long_curve_keeps_its_ends_and_every_peak_when_it_is_thinned() -> None:
    long = Curve()
    for step in range(200_000):
        long.put(step, 1.0 + 0.1 * math.sin(step))
    for step, value in ((77_777, 9.0), (120_001, -9.0), (3, None)):
        long.put(step, value)
    points = long.thin()
    assert MOST - 2 <= len(points["steps"]) <= MOST
    assert points["steps"] == sorted(set(points["steps"]))
    assert (points["steps"][0], points["steps"][-1]) == (0, 199_999)
    assert {9.0, -9.0} <= set(points["values"])
    assert len(long.thin(10)["steps"]) <= 10


def test_a_run_of_days_is_a_page_of_a_moment() -> None:
    """Two hundred thousand events: what the browser is sent does not grow with them."""
    events = [world(2, 1.0), *(progress(step, loss=2.0, tokens_per_second=1e5, steps=10**6) for step in range(200_000))]
    told = Told()
    for event in events:
        told.add(event)
    assert len(told.story.events) == 2
    assert len(json.dumps(made_page("days", told, [TaskState("node0", "a", "running")], (), 10**6))) < 120_000


def test_the_story_tells_the_same_as_all_events() -> None:
    for end in ("", "done", "failed"):
        events = made.told(end=end)
        story = Story()
        for event in events:
            story.add(event)
        assert history("demo", story.events) == history("demo", events)
        now = events[-1].time
        assert status("demo", story.events, made.tasks(), now) == status("demo", events, made.tasks(), now)


def test_marks_stand_where_the_run_went_on() -> None:
    found = markers(made.told(end="failed"))
    assert [(mark["step"], mark["kind"], mark["label"]) for mark in found] == [
        (400, "restart", "restart"),
        (760, "scale", "3 → 4 nodes"),
        (1010, "failed", "failed"),
    ]
    assert found[0]["text"] == f"world 2, 3 nodes: node1 rank 3 failed: {made.KILLED}"


def page(end: str = "") -> Data:
    events = made.told(end=end)
    now = events[-1].time
    return page_of("demo", events, made.tasks(), made.lines(now), now)


def test_nodes_links_and_facts() -> None:
    data = page()
    assert {node["node"]: node["health"] for node in data["nodes"]} == {"node0": "ok", "node1": "ok", "node2": "warn", "node3": "warn"}
    assert data["nodes"][2]["cares"] == ["GPU 1 has 91 °C"]
    assert data["nodes"][3]["ranks"] == [6, 7]
    assert data["nodes"][1]["restarts"]["count"] == 1
    assert len(data["links"]) == 6
    driver = next(fact for fact in data["facts"] if fact["name"] == "versions.driver")
    assert driver["values"] == [{"value": "580.95.05", "nodes": ["node0", "node1", "node2"]}, {"value": "575.57.08", "nodes": ["node3"]}]
    assert (data["state"], data["worlds"], data["failures"], data["checkpoints_made"]) == ("training", 3, 1, 10)


def test_why_it_died() -> None:
    died = page("failed")["why"]
    assert (died["who"], died["host"], died["known"]) == ("node3 rank 7", "gpu-4", "GPU memory")
    assert page("done")["state"] == "done"


def test_an_empty_run_has_a_page() -> None:
    data = page_of("new", (), (), (), 0.0)
    assert (data["state"], data["curves"], data["why"]) == ("starting", {}, None)
    assert 'swarmtrain_run_state{run="new",state="starting"} 1\n' in prometheus.text(data, 0.0)


def test_a_report_is_one_file_and_no_text_in_it_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>document.title='taken'</script><!--"
    html = files.one_file(page("failed"), [line_data(LogLine("node0", evil))])
    assert evil not in html
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=(?!\"data:)", html)
    told = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])  # type: ignore[index]
    assert (told["page"]["run"], told["lines"][0]["text"]) == ("demo", evil)


def test_the_plotting_library_is_the_one_that_was_published() -> None:
    folder = resources("swarmtrain.view.page") / "assets" / "uplot"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {item.name for item in folder.iterdir()} == {*manifest["files"], "manifest.json"}
    for name, facts in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"], name
    assert "MIT" in (folder / "LICENSE").read_text()


def test_numbers_for_prometheus() -> None:
    data = page()
    text = prometheus.text(data, data["progress"]["time"] + 30)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in {
        'run_state{run="demo",state="training"}': "1",
        'run_state{run="demo",state="failed"}': "0",
        'step{run="demo"}': "1010",
        'steps{run="demo"}': "1200",
        'world_size{run="demo"}': "8",
        'nodes_wanted{run="demo"}': "4",
        'nodes_running{run="demo"}': "4",
        'failures_total{run="demo"}': "1",
        'since_last_step_seconds{run="demo"}': "30",
        'checkpoint_step{run="demo"}': "1000",
        'straggler{run="demo"}': "1",
        'node_restarts_total{run="demo",node="node1",host="gpu-2"}': "1",
        'gpu_temperature_celsius{run="demo",node="node2",host="gpu-3",gpu="1"}': "91",
        'metric{run="demo",name="accuracy"}': str(data["progress"]["metrics"]["accuracy"]),
    }.items():
        assert samples[f"swarmtrain_{name}"] == value, name
    assert 0.9 < float(samples['swarmtrain_gpu_use_ratio{run="demo",node="node0",host="gpu-1",gpu="0"}']) < 1
    assert "loss_max" not in text
    names = re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE)
    assert len(names) == len(set(names)) == text.count("# HELP ")
    assert {name.partition("{")[0] for name in samples} == set(names)


def test_labels_are_escaped() -> None:
    data = page_of('a"b\\c\nd', (), (), (), 0.0)
    assert 'run="a\\"b\\\\c\\nd"' in prometheus.text(data, 0.0)


def test_every_number_of_an_alert_is_one_that_there_is() -> None:
    alerts = (Path(__file__).parents[2] / "examples" / "prometheus-alerts.yml").read_text()
    told = prometheus.text(page(), made.BEGAN)
    used = set(re.findall(r"swarmtrain_\w+", alerts))
    assert used
    assert used <= set(re.findall(r"^# TYPE (\S+)", told, re.MULTILINE))


def test_a_run_that_is_down_has_its_page_from_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    folder = kept.directory("demo")
    folder.mkdir(parents=True)
    (folder / kept.EVENTS).write_text("".join(f"{event.to_line()}\n" for event in made.told() if event.kind != wire.LINK))
    (folder / "node3.log").write_text("2026-11-22T19:08:45.681347946Z [rank 7] out of words\n")
    kept.mark("demo", "down")
    probed = kept.directory("demo-probe")
    probed.mkdir()
    (probed / kept.EVENTS).write_text("".join(f"{event.to_line()}\n" for event in made.told() if event.kind == wire.LINK))
    found = source("demo")
    data = found.page()
    assert (data["state"], data["progress"]["step"], len(data["links"]), len(data["markers"])) == ("down", 1010, 6, 2)
    assert {node["health"] for node in data["nodes"]} == {"off"}
    assert found.lines()[0] == [{"node": "node3", "rank": 7, "time": pytest.approx(1795374525.68, abs=0.01), "text": "out of words"}]
    with pytest.raises(SwarmtrainError):
        source("never")
