"""The files in examples/ for Prometheus and Grafana: valid, and all their expressions use metrics and labels that the dashboard exports."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_cluster
import sample_run
import yaml

from swarmtrain.view.dashboard.cluster_metrics import render_cluster_metrics
from swarmtrain.view.dashboard.page_data import build_page_data_from_events

EXAMPLES = Path(__file__).parents[2] / "examples"
GRAFANA_FILE = EXAMPLES / "grafana-dashboard.json"
ALERTS_FILE = EXAMPLES / "prometheus-alerts.yml"
GRID_WIDTH = 24
_FUNCTIONS = {"sum", "min", "max", "avg", "count", "increase", "rate", "label_values"}
_KEYWORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "group_left", "group_right"}
_OTHER_METRICS = {"up": {"job"}}
"""Metrics that Prometheus itself adds, with their labels."""
_TOKEN_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"|\[[0-9]+[smhd]\]|[0-9.]+|[A-Za-z_]\w*|[=!]~|[=!<>]=|[-+*/<>=(){},]')
_GROUPING_PATTERN = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR_PATTERN = re.compile(r"\{([^}]*)\}")
_MATCHER_PATTERN = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
_SAMPLE_PATTERN = re.compile(r"(\w+)(?:\{(.*)\})? \S+")
_LABEL_PATTERN = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_exported_metrics() -> dict[str, dict[str, set[str]]]:
    """Return metric → label → values, of what one target exports for runs in each state and a cluster with a queue."""
    runs = []
    for outcome in ("", "done", "failed"):
        events = sample_run.build_events(outcome=outcome)
        now = events[-1].time
        runs.append((f"run{outcome}", build_page_data_from_events("demo", events, sample_run.build_tasks(), (), now)))
    text = render_cluster_metrics(sample_cluster.build_page(), runs, now, is_reachable=True)
    metrics: dict[str, dict[str, set[str]]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = _SAMPLE_PATTERN.fullmatch(line)
            assert match, line
            labels = metrics.setdefault(match[1], {})
            for label, value in _LABEL_PATTERN.findall(match[2] or ""):
                labels.setdefault(label, set()).add(value)
    return metrics


EXPORTED = read_exported_metrics()


def find_problems(expression: str) -> list[str]:
    """Return what an expression uses that the dashboard does not export, or that this test cannot read."""
    problems = [f"cannot be read: {rest}" for rest in _TOKEN_PATTERN.sub("", expression).split()]
    used: set[str] = set()
    labels = {label.strip() for group in _GROUPING_PATTERN.findall(expression) for label in group.split(",")}
    flat = _GROUPING_PATTERN.sub(" ", expression)
    for match in re.finditer(r"([A-Za-z_]\w*)\s*(\{[^}]*\})?", _mask_selectors(flat)):
        name = match[1]
        if name in EXPORTED or name in _OTHER_METRICS:
            used.add(name)
        elif name not in _FUNCTIONS | _KEYWORDS:
            problems.append(f"{name} is not exported")
    for name, selector in re.findall(r"(\w+)\s*\{([^}]*)\}", flat):
        problems += _find_selector_problems(name, selector)
    if not used:
        problems.append("it has no metric")
    problems += [f"{label} is not a label of {name}" for label in labels for name in used if label not in _get_labels(name)]
    return problems


def _mask_selectors(expression: str) -> str:
    return _SELECTOR_PATTERN.sub(" ", re.sub(r"\[\d+[smhd]\]", " ", expression))


def _get_labels(name: str) -> set[str]:
    return set(EXPORTED.get(name, {})) | _OTHER_METRICS.get(name, set())


def _find_selector_problems(name: str, selector: str) -> Iterator[str]:
    matchers = list(_MATCHER_PATTERN.finditer(selector))
    if "".join(match[0] for match in matchers) != selector:
        yield f"cannot be read: {{{selector}}}"
    for match in matchers:
        label, operator, text = match.groups()
        if label not in _get_labels(name):
            yield f"{label} is not a label of {name}"
        elif label == "state":
            values = set(text.split("|")) if "~" in operator else {text}
            yield from (f"{name} is never in the state {value}" for value in sorted(values - EXPORTED[name]["state"]))


def read_dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(GRAFANA_FILE.read_text())
    return dashboard


def list_targets() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return all targets of the Grafana dashboard, each with its panel."""
    return [(panel, target) for panel in read_dashboard()["panels"] for target in panel.get("targets", ())]


def list_alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS_FILE.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum by (run) (swarmtrain_los)", "swarmtrain_los is not exported"),
        ("swarmtrain_loss{node='a'}", "cannot be read"),
        ('swarmtrain_loss{node="a"}', "node is not a label of swarmtrain_loss"),
        ("sum by (node) (swarmtrain_loss)", "node is not a label of swarmtrain_loss"),
        ('swarmtrain_run_state{state=~"training|trained"}', "swarmtrain_run_state is never in the state trained"),
        ("swarmtrain_loss ? 1", "cannot be read: ?"),
        ("1 > 0", "it has no metric"),
    ],
)
def test_an_expression_of_something_that_is_not_exported_is_found(expression: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in find_problems(expression)), find_problems(expression)


def test_each_expression_of_the_grafana_dashboard_uses_what_is_exported() -> None:
    expressions = {target["expr"] for _, target in list_targets()}
    variables = [variable for variable in read_dashboard()["templating"]["list"] if variable["type"] == "query"]
    assert {variable["query"]["query"] for variable in variables} == {"label_values(swarmtrain_run_state, run)"}
    assert "run" in EXPORTED["swarmtrain_run_state"]
    assert len(expressions) > 20
    assert {expression: problems for expression in expressions if (problems := find_problems(expression))} == {}


def test_each_legend_of_the_grafana_dashboard_uses_labels_of_its_metrics() -> None:
    for panel, target in list_targets():
        grouping = re.search(r"\bby\s*\(([^)]*)\)", target["expr"])
        metric = re.search(r"swarmtrain_\w+", target["expr"])
        assert metric
        available = {label.strip() for label in grouping[1].split(",")} if grouping else _get_labels(metric[0])
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= available, panel["title"]


def test_the_grafana_dashboard_can_be_imported() -> None:
    """The rules of an exported dashboard: a data source to choose, unique ids, and panels inside the grid that do not overlap."""
    dashboard = read_dashboard()
    assert [(item["name"], item["type"], item["pluginId"]) for item in dashboard["__inputs"]] == [
        ("DS_PROMETHEUS", "datasource", "prometheus")
    ]
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    panels = dashboard["panels"]
    plots = [panel for panel in panels if panel["type"] != "row"]
    assert all(
        item["datasource"] == source for item in [*plots, *(target for _, target in list_targets()), *dashboard["templating"]["list"]]
    )
    assert {panel["type"] for panel in plots} == {item["id"] for item in dashboard["__requires"] if item["type"] == "panel"}
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["targets"] for panel in plots)
    for panel in plots:
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), panel["title"]
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] >= 0
        assert grid["y"] >= 0
        assert grid["h"] > 0 < grid["w"], panel["title"]
        assert grid["x"] + grid["w"] <= GRID_WIDTH, panel["title"]
    overlapping = [
        (one["title"], other["title"]) for one, other in itertools.combinations(panels, 2) if _overlap(one["gridPos"], other["gridPos"])
    ]
    assert overlapping == []


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size] for start, size in (("x", "w"), ("y", "h"))
    )


def test_each_alert_uses_what_is_exported() -> None:
    alerts = list_alerts()
    assert len({alert["alert"] for alert in alerts}) == len(alerts) > 10
    for alert in alerts:
        assert find_problems(alert["expr"]) == [], alert["alert"]
        metric = re.search(r"swarmtrain_\w+|\bup\b", alert["expr"])
        assert metric
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
        assert labels <= _get_labels(metric[0]), alert["alert"]
        assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", alert.get("for", "0s"))
        assert alert["labels"]["severity"] in ("page", "warn")


def test_no_metric_has_two_names() -> None:
    """Two metrics that are equal in all samples of the sample cluster would be one metric under two names."""
    events = sample_run.build_events()
    now = events[-1].time + 7
    runs = [("demo", build_page_data_from_events("demo", events, sample_run.build_tasks(), (), now))]
    text = render_cluster_metrics(sample_cluster.build_page(), runs, now, is_reachable=True)
    series: dict[str, set[tuple[str, str]]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = _SAMPLE_PATTERN.fullmatch(line)
            assert match
            series.setdefault(match[1], set()).add((match[2] or "", line.rpartition(" ")[2]))
    equal = [(one, other) for one, other in itertools.combinations(series, 2) if series[one] == series[other] and len(series[one]) > 1]
    assert equal == []
