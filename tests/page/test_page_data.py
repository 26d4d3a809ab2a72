"""Events → the data of a page: curves with each step once, markers at restarts, nodes, links, facts; and a bounded size."""

from __future__ import annotations

import hashlib
import json
import math
import re
from importlib.resources import files as resources
from pathlib import Path

import pytest
import sample_run

from swarmtrain import protocol
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.common.history_store import EVENTS_FILE, RecordedRun, build_operation_event
from swarmtrain.protocol import Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.view.dashboard import html_page, prometheus
from swarmtrain.view.dashboard.curves import MAX_POINTS, Curve, CurveSet
from swarmtrain.view.dashboard.data_source import open_data_source
from swarmtrain.view.dashboard.event_timeline import EventAccumulator, EventTimeline
from swarmtrain.view.dashboard.page_data import (
    PageData,
    build_output_line_data,
    build_page_data,
    build_page_data_from_events,
    find_curve_markers,
)
from swarmtrain.view.history import build_history_entries
from swarmtrain.view.status import build_status


def build_progress(step: int, **values: object) -> Event:
    return Event(protocol.EVENT_PROGRESS, {"step": step, **values}, 100.0 + step)


def build_world(nodes: int, at: float) -> Event:
    return Event(protocol.EVENT_WORLD_FORMED, {"world_size": nodes, "nodes": nodes}, at)


def collect_curve(events: list[Event], name: str = "loss") -> dict[int, float]:
    curves = CurveSet()
    for event in events:
        curves.add_event(event)
    points = curves.downsample_curves()[name]
    assert points["steps"] == sorted(set(points["steps"]))
    return dict(zip(points["steps"], points["values"], strict=True))


def test_of_each_step_the_newest_value_counts() -> None:
    events = [
        build_progress(1, loss=5.0),
        build_progress(2, loss=4.0),
        build_progress(2, loss=4.5),
        build_progress(1, loss=5.0),
        build_progress(3, loss=3.0),
    ]
    assert collect_curve(events) == {1: 5.0, 2: 4.5, 3: 3.0}


def test_what_a_checkpoint_does_not_hold_is_taken_back() -> None:
    before = [build_world(2, 1), *(build_progress(step, loss=10.0 - step) for step in (2, 4, 6))]
    evaluations = [Event(protocol.EVENT_EVALUATION, {"step": 6, "loss": 9.0}, 107.0)]
    resumed = [build_world(2, 108), Event(protocol.EVENT_RESUMED, {"step": 4}, 109.0)]
    assert collect_curve([*before, *resumed, build_progress(5, loss=1.0)]) == {2: 8.0, 4: 6.0, 5: 1.0}
    assert "validation" not in _list_curve_names([*before, *evaluations, *resumed])


def test_a_script_that_restarts_without_notice_restarts_its_curves() -> None:
    before = [build_world(2, 1), *(build_progress(step, loss=10.0 - step) for step in (2, 4, 6))]
    assert collect_curve([*before, build_world(2, 108), build_progress(3, loss=1.0)]) == {2: 8.0, 3: 1.0}
    assert collect_curve([*before, build_world(2, 108), build_progress(7, loss=1.0)]) == {2: 8.0, 4: 6.0, 6: 4.0, 7: 1.0}


def test_nan_is_a_gap() -> None:
    assert collect_curve([build_progress(1, loss=2.0), build_progress(2, loss=math.nan), build_progress(3, loss=None)]) == {
        1: 2.0,
        2: None,
        3: None,
    }
    assert _list_curve_names([build_progress(1, loss=None, mfu=None)]) == set()


def test_groups_have_names_of_their_own() -> None:
    progress = build_progress(1, phases={"data": 0.1}, memory={"peak": 5}, metrics={"accuracy": 0.5}, other={"x": 1})
    assert _list_curve_names([progress]) == {"phase.data", "memory.peak", "metric.accuracy"}


def _list_curve_names(events: list[Event]) -> set[str]:
    curves = CurveSet()
    for event in events:
        curves.add_event(event)
    return set(curves.downsample_curves())


def test_a_long_curve_keeps_its_ends_and_every_peak_when_it_is_thinned() -> None:
    long = Curve()
    for step in range(200_000):
        long.set_value(step, 1.0 + 0.1 * math.sin(step))
    for step, value in ((77_777, 9.0), (120_001, -9.0), (3, None)):
        long.set_value(step, value)
    points = long.downsample_points()
    assert MAX_POINTS - 2 <= len(points["steps"]) <= MAX_POINTS
    assert points["steps"] == sorted(set(points["steps"]))
    assert (points["steps"][0], points["steps"][-1]) == (0, 199_999)
    assert {9.0, -9.0} <= set(points["values"])
    assert len(long.downsample_points(10)["steps"]) <= 10


def test_a_run_of_days_is_a_page_of_a_moment() -> None:
    """With 200,000 events: the size of what the browser receives does not grow with them."""
    events = [build_world(2, 1.0), *(build_progress(step, loss=2.0, tokens_per_second=1e5, steps=10**6) for step in range(200_000))]
    accumulator = EventAccumulator()
    for event in events:
        accumulator.add_event(event)
    assert len(accumulator.timeline.events) == 2
    assert len(json.dumps(build_page_data("days", accumulator, [TaskState("node0", "a", "running")], (), 10**6))) < 120_000


def test_the_timeline_shows_the_same_as_all_events() -> None:
    for end in ("", "done", "failed"):
        events = sample_run.build_events(outcome=end)
        story = EventTimeline()
        for event in events:
            story.add_event(event)
        assert build_history_entries(story.events) == build_history_entries(events)
        now = events[-1].time
        assert build_status("demo", story.events, sample_run.build_tasks(), now) == build_status(
            "demo", events, sample_run.build_tasks(), now
        )


def test_marks_show_where_the_run_resumed() -> None:
    found = find_curve_markers(sample_run.build_events(outcome="failed"))
    assert [(mark["step"], mark["kind"], mark["label"]) for mark in found] == [
        (400, "restart", "restart"),
        (760, "scale", "3 → 4 nodes"),
        (1010, "failed", "failed"),
    ]
    assert found[0]["text"] == f"world 2, 3 nodes: node1 rank 3 failed: {sample_run.ECC_ERROR}"


def build_sample_page(outcome: str = "") -> PageData:
    events = sample_run.build_events(outcome=outcome)
    now = events[-1].time
    return build_page_data_from_events("demo", events, sample_run.build_tasks(), sample_run.build_log_lines(now), now)


def test_nodes_links_and_facts() -> None:
    data = build_sample_page()
    assert {node["node"]: node["health"] for node in data["nodes"]} == {"node0": "ok", "node1": "ok", "node2": "warn", "node3": "warn"}
    assert data["nodes"][2]["warnings"] == ["GPU 1 is at 91 °C"]
    assert data["nodes"][3]["ranks"] == [6, 7]
    assert data["nodes"][1]["restarts"]["count"] == 1
    assert len(data["links"]) == 6
    driver = next(fact for fact in data["node_facts"] if fact["name"] == "versions.driver")
    assert driver["values"] == [{"value": "580.95.05", "nodes": ["node0", "node1", "node2"]}, {"value": "575.57.08", "nodes": ["node3"]}]
    assert (data["state"], data["worlds"], data["failures"], data["checkpoint_count"]) == ("training", 3, 1, 10)


def test_why_it_died() -> None:
    died = build_sample_page("failed")["why"]
    assert (died["rank_label"], died["host"], died["signature"]) == ("node3 rank 7", "gpu-4", "GPU memory")
    assert build_sample_page("done")["state"] == "done"


def test_an_empty_run_has_a_page() -> None:
    data = build_page_data_from_events("new", (), (), (), 0.0)
    assert (data["state"], data["curves"], data["why"]) == ("starting", {}, None)
    assert 'swarmtrain_run_state{run="new",state="starting"} 1\n' in prometheus.render_metrics(data, 0.0)


def test_a_report_is_one_file_and_no_text_in_it_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>document.title='taken'</script><!--"
    html = html_page.render_single_file_page(build_sample_page("failed"), [build_output_line_data(LogLine("node0", evil))])
    assert evil not in html
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=(?!\"data:)", html)
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])  # type: ignore[index]
    assert (embedded["page"]["run"], embedded["lines"][0]["text"]) == ("demo", evil)


def test_the_plotting_library_is_the_one_that_was_published() -> None:
    folder = resources("swarmtrain.view.dashboard") / "assets" / "uplot"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {item.name for item in folder.iterdir()} == {*manifest["files"], "manifest.json"}
    for name, facts in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"], name
    assert "MIT" in (folder / "LICENSE").read_text()


def test_numbers_for_prometheus() -> None:
    data = build_sample_page()
    text = prometheus.render_metrics(data, data["progress"]["time"] + 30)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in {
        'run_state{run="demo",state="training"}': "1",
        'run_state{run="demo",state="failed"}': "0",
        'step{run="demo"}': "1010",
        'steps{run="demo"}': "1200",
        'world_size{run="demo"}': "8",
        'nodes_desired{run="demo"}': "4",
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
    assert 0.9 < float(samples['swarmtrain_gpu_utilization_ratio{run="demo",node="node0",host="gpu-1",gpu="0"}']) < 1
    assert "max_replica_loss" not in text
    names = re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE)
    assert len(names) == len(set(names)) == text.count("# HELP ")
    assert {name.partition("{")[0] for name in samples} == set(names)


def test_micro_batches_that_are_assigned_by_speed() -> None:
    progress = Event(protocol.EVENT_PROGRESS, {"step": 1, "micro_batches": {"node0": [4, 4], "node1": [2]}}, 1.0)
    text = prometheus.render_metrics(build_page_data_from_events("demo", [progress], (), (), 2.0), 2.0)
    assert 'swarmtrain_node_micro_batches{run="demo",node="node0"} 8\n' in text
    assert 'swarmtrain_node_micro_batches{run="demo",node="node1"} 2\n' in text


def test_labels_are_escaped() -> None:
    data = build_page_data_from_events('a"b\\c\nd', (), (), (), 0.0)
    assert 'run="a\\"b\\\\c\\nd"' in prometheus.render_metrics(data, 0.0)


def test_a_run_that_is_down_has_its_page_from_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    recorded_run = RecordedRun("demo", RunIdentity("aaaaaaaaaaaa"))
    recorded_run.create_folder()
    (recorded_run.folder / EVENTS_FILE).write_text(
        "".join(f"{event.to_line()}\n" for event in sample_run.build_events() if event.kind != protocol.EVENT_LINK)
    )
    (recorded_run.folder / "node3.log").write_text("2026-11-22T19:08:45.681347946Z [rank 7] out of words\n")
    recorded_run.record_operation(build_operation_event("down"))
    probe = RecordedRun("demo-probe", RunIdentity("bbbbbbbbbbbb"))
    probe.create_folder()
    (probe.folder / EVENTS_FILE).write_text(
        "".join(f"{event.to_line()}\n" for event in sample_run.build_events() if event.kind == protocol.EVENT_LINK)
    )
    found = open_data_source("demo")
    data = found.get_page_data()
    assert (data["state"], data["progress"]["step"], len(data["links"]), len(data["markers"])) == ("down", 1010, 6, 2)
    assert {node["health"] for node in data["nodes"]} == {"off"}
    assert found.get_output_lines()[0] == [
        {"node": "node3", "rank": 7, "time": pytest.approx(1795374525.68, abs=0.01), "text": "out of words"}
    ]
    with pytest.raises(SwarmtrainError):
        open_data_source("never")
