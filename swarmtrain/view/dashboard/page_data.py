"""Page data of the dashboard: a run's curves, timeline, tasks and output lines as one JSON-compatible value without non-finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swarmtrain import protocol
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.task_words import describe_task_reason
from swarmtrain.protocol import Event
from swarmtrain.view.dashboard.event_timeline import EventAccumulator
from swarmtrain.view.history import build_history_entries
from swarmtrain.view.status import RunStatus, build_status
from swarmtrain.view.why import diagnose_failure
from swarmtrain.view.worlds import list_worlds

PageData = dict[str, Any]
_MAX_CHECKPOINTS = 100
_MAX_HISTORY_ENTRIES = 500
_MAX_MARKERS = 100
_OFF_STATES = ("down", "queued", "stopped", "shutdown", "complete", "remove", "orphaned")
_RECENT_RESTART_SECONDS = 600.0
"""Seconds for which a restarted node is highlighted."""
_HOT_GPU_CELSIUS = 88.0
"""Temperature in °C at which server GPUs begin to throttle."""


def build_page_data(
    run: str, accumulator: EventAccumulator, tasks: Sequence[TaskState], log_lines: Iterable[LogLine], now: float
) -> PageData:
    """Return the page data of `run`. Times are in seconds since the epoch, sizes in bytes."""
    timeline = accumulator.timeline.events
    run_status = build_status(run, timeline, tasks, now)
    diagnosis = diagnose_failure(run, timeline, tasks, log_lines)
    checkpoints = [{**event.data, "time": event.time} for event in timeline if event.kind == protocol.EVENT_CHECKPOINT]
    entries = [
        {"time": entry.time, "kind": entry.kind, "text": entry.text, "node": entry.data.get("node")}
        for entry in build_history_entries(timeline)[-_MAX_HISTORY_ENTRIES:]
    ]
    page_data: PageData = {
        "run": run,
        "state": "down" if _is_run_removed(run_status) else run_status.state,
        "started": run_status.started,
        "ended": run_status.ended or (_get_last_event_time(timeline) if _is_run_removed(run_status) else None),
        "outcome": run_status.reason,
        "exit_code": run_status.exit_code,
        "hint": run_status.hint,
        "progress": run_status.progress,
        "validation": run_status.validation,
        "world": run_status.world,
        "worlds": len(run_status.worlds),
        "failures": run_status.failures,
        "straggler": run_status.straggler,
        "curves": accumulator.curves.downsample_curves(),
        "markers": find_curve_markers(timeline)[-_MAX_MARKERS:],
        "nodes": _build_node_page_data(run_status, timeline, now),
        "links": _collect_latest_link_measurements(timeline),
        "checkpoints": checkpoints[-_MAX_CHECKPOINTS:],
        "checkpoint_count": len(checkpoints),
        "history": entries,
        "why": {**diagnosis.to_dict(), "rank_label": diagnosis.rank_label} if diagnosis else None,
        "node_facts": collect_node_facts(timeline),
        "token_rates": collect_token_rates(timeline),
    }
    clean: PageData = replace_non_finite_numbers(page_data)
    return clean


def build_page_data_from_events(
    run: str, events: Iterable[Event], tasks: Sequence[TaskState], log_lines: Iterable[LogLine], now: float
) -> PageData:
    """Return the page data of `run`, computed from all its events, oldest first."""
    accumulator = EventAccumulator()
    for event in events:
        accumulator.add_event(event)
    return build_page_data(run, accumulator, tasks, log_lines, now)


def build_output_line_data(line: LogLine) -> PageData:
    """Return the page data of one output line."""
    return {"node": line.node, "rank": line.rank, "time": line.time, "text": line.text}


def find_curve_markers(timeline: Iterable[Event]) -> list[PageData]:
    """Return the markers drawn in the curves: where the run restarted, was scaled, or finally failed."""
    found_markers: list[PageData] = []
    step, has_progressed, previous_nodes = 0, True, None
    worlds_by_time = {world.time: world for world in list_worlds(list(timeline))}
    for event in timeline:
        if event.kind == protocol.EVENT_PROGRESS:
            step, has_progressed = int(event.data.get("step") or step), True
        elif event.kind == protocol.EVENT_RESUMED:
            step = int(event.data.get("step") or 0)
            if found_markers and not has_progressed:
                found_markers[-1]["step"] = step
        elif event.kind == protocol.EVENT_WORLD_FORMED:
            world = worlds_by_time[event.time]
            if previous_nodes is not None:
                scaled = world.nodes != previous_nodes
                label = f"{previous_nodes} → {world.nodes} nodes" if scaled else "restart"
                text = f"world {world.number}, {world.nodes} nodes{f': {world.reason}' if world.reason else ''}"
                found_markers.append(
                    {"step": step, "time": event.time, "kind": "scale" if scaled else "restart", "label": label, "text": text}
                )
                has_progressed = False
            previous_nodes = world.nodes
        elif event.kind == protocol.EVENT_OUTCOME and event.data.get("status") == "failed":
            found_markers.append(
                {"step": step, "time": event.time, "kind": "failed", "label": "failed", "text": str(event.data.get("reason", ""))}
            )
    return found_markers


def collect_node_facts(timeline: Iterable[Event]) -> list[PageData]:
    """Return the facts that the nodes reported at the start, one row per fact: name, values, and the nodes that reported each value."""
    newest_reports = {str(event.data.get("node", "")): event.data for event in timeline if event.kind == protocol.EVENT_RUN_REPORT}
    rows: dict[str, dict[str, list[str]]] = {}
    for node, facts_by_name in newest_reports.items():
        for name, value in _flatten_facts({key: value for key, value in facts_by_name.items() if key != "node"}):
            rows.setdefault(name, {}).setdefault(value, []).append(node)
    return [
        {"name": name, "values": [{"value": value, "nodes": nodes} for value, nodes in facts_by_name.items()]}
        for name, facts_by_name in rows.items()
    ]


def collect_token_rates(timeline: Iterable[Event]) -> list[list[int]]:
    """Return the tokens per step that the ranks reported, as pairs: the step after which a number applies, and the number.

    There is more than one pair if the run was resumed with another global batch or sequence length. Empty if nothing was reported.
    """
    rates: list[list[int]] = []
    step = 0
    for event in timeline:
        if event.kind == protocol.EVENT_PROGRESS:
            step = int(event.data.get("step") or step)
        elif event.kind == protocol.EVENT_RESUMED:
            step = int(event.data.get("step") or 0)
            if rates and rates[-1][0] > step:
                rates = [*(rate for rate in rates if rate[0] < step), [step, rates[-1][1]]]
        elif event.kind == protocol.EVENT_RUN_REPORT:
            tokens = event.data.get("tokens_per_step")
            if isinstance(tokens, int) and (not rates or rates[-1][1] != tokens):
                rates.append([step, tokens])
    return rates


def replace_non_finite_numbers(value: Any) -> Any:
    """Return `value` with None for every non-finite number, since JSON does not support non-finite numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite_numbers(item) for key, item in value.items()}
    return [replace_non_finite_numbers(item) for item in value] if isinstance(value, list | tuple) else value


def _flatten_facts(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, item in facts.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _flatten_facts(item, f"{name}.")
        else:
            yield name, ", ".join(map(str, item)) if isinstance(item, list | tuple) else str(item)


def _is_run_removed(run_status: RunStatus) -> bool:
    return run_status.ended is None and bool(run_status.tasks) and all(task.state == "down" for task in run_status.tasks)


def _get_last_event_time(timeline: Sequence[Event]) -> float | None:
    return timeline[-1].time if timeline else None


def _build_node_page_data(run_status: RunStatus, timeline: Iterable[Event], now: float) -> list[PageData]:
    joined = {str(event.data.get("node")): event.data for event in timeline if event.kind == protocol.EVENT_NODE_JOINED}
    ranks = run_status.world.get("ranks") or {}
    nodes = []
    for task in run_status.tasks:
        if task.node == protocol.RENDEZVOUS_SERVICE and not describe_task_reason(task):
            continue
        restarts, quarantine = run_status.restarts.get(task.node), run_status.quarantined.get(task.node)
        join_data = joined.get(task.node, {})
        usage = run_status.usage.get(task.node, {}) if task.state == "running" else {}
        warnings = [
            *([task_reason] if (task_reason := describe_task_reason(task)) else []),
            *([f"quarantined: {quarantine.reason}"] if quarantine else []),
            *([str(run_status.straggler.get("message", ""))] if run_status.straggler.get("node") == task.node else []),
            *(
                f"GPU {number} is at {gpu['temperature']:.0f} °C"
                for number, gpu in enumerate(usage.get("gpus") or [])
                if (gpu.get("temperature") or 0) >= _HOT_GPU_CELSIUS
            ),
        ]
        restarted_recently = restarts is not None and run_status.ended is None and now - restarts.time < _RECENT_RESTART_SECONDS
        nodes.append(
            {
                "node": task.node,
                "host": task.host or str(join_data.get("host", "")),
                "state": task.state,
                "health": _classify_task_health(task, bool(warnings) or restarted_recently),
                "warnings": warnings,
                "address": join_data.get("address"),
                "interface": join_data.get("interface"),
                "ranks": ranks.get(task.node, []),
                "restarts": {"count": restarts.count, "time": restarts.time, "reason": restarts.reason} if restarts else None,
                **usage,
                "gpus": usage.get("gpus") or [],
                "reserved": list(task.gpus),
            }
        )
    return nodes


def _classify_task_health(task: TaskState, needs_attention: bool) -> str:
    """Return the health class of a task: ok, warn, bad or off."""
    if task.state in ("failed", "rejected", "dead"):
        return "bad"
    if task.state in _OFF_STATES:
        return "off"
    return "warn" if needs_attention or task.state != "running" else "ok"


def _collect_latest_link_measurements(timeline: Iterable[Event]) -> list[PageData]:
    """Return the newest measurement of the network link between each pair of nodes."""
    newest = {
        (event.data.get("a"), event.data.get("b")): {**event.data, "time": event.time}
        for event in timeline
        if event.kind == protocol.EVENT_LINK
    }
    return list(newest.values())
