"""Curves, story, tasks and lines of a run → the one value that its page shows: mappings, lists, texts and finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swarmtrain import wire
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.view.history import history
from swarmtrain.view.page.story import Told
from swarmtrain.view.status import Status, status
from swarmtrain.view.why import why
from swarmtrain.view.worlds import worlds
from swarmtrain.wire import Event

Data = dict[str, Any]
_CHECKPOINTS = 100
_ENTRIES = 500
_MARKERS = 100
_OFF = ("down", "stopped", "shutdown", "complete", "remove", "orphaned")
_RECENT = 600.0
"""Seconds for which a node that was started again is still looked at with care."""
_HOT = 88.0
"""Degrees Celsius at which GPUs of servers begin to slow down, or nearly."""


def page(run: str, told: Told, tasks: Sequence[TaskState], lines: Iterable[LogLine], now: float) -> Data:
    """Return what the page of `run` shows; times are in seconds since the epoch, sizes in bytes."""
    story = told.story.events
    stands = status(run, story, tasks, now)
    died = why(run, story, tasks, lines)
    saved = [{**event.data, "time": event.time} for event in story if event.kind == wire.CHECKPOINT]
    entries = [
        {"time": entry.time, "kind": entry.kind, "text": entry.text, "node": entry.data.get("node")}
        for entry in history(run, story).entries[-_ENTRIES:]
    ]
    made: Data = {
        "run": run,
        "state": "down" if _is_down(stands) else stands.state,
        "started": stands.started,
        "ended": stands.ended or (_last_time(story) if _is_down(stands) else None),
        "verdict": stands.why,
        "exit_code": stands.exit_code,
        "hint": stands.hint,
        "progress": stands.progress,
        "evaluation": stands.evaluation,
        "world": stands.world,
        "worlds": len(stands.worlds),
        "failures": stands.failures,
        "straggler": stands.straggler,
        "curves": told.curves.thin(),
        "markers": markers(story)[-_MARKERS:],
        "nodes": _nodes(stands, story, now),
        "links": _links(story),
        "checkpoints": saved[-_CHECKPOINTS:],
        "checkpoints_made": len(saved),
        "history": entries,
        "why": {**died.to_dict(), "who": died.who} if died else None,
        "facts": facts(story),
    }
    clean: Data = finite(made)
    return clean


def page_of(run: str, events: Iterable[Event], tasks: Sequence[TaskState], lines: Iterable[LogLine], now: float) -> Data:
    """Return what the page of `run` shows, from all its events, oldest first."""
    told = Told()
    for event in events:
        told.add(event)
    return page(run, told, tasks, lines, now)


def line_data(line: LogLine) -> Data:
    """Return a line of output as the page shows it."""
    return {"node": line.node, "rank": line.rank, "time": line.time, "text": line.text}


def markers(story: Iterable[Event]) -> list[Data]:
    """Return where on the curves the run was started anew or scaled, and where it failed for good."""
    found: list[Data] = []
    step, since, before = 0, True, None
    formed = {world.time: world for world in worlds(list(story))}
    for event in story:
        if event.kind == wire.PROGRESS:
            step, since = int(event.data.get("step") or step), True
        elif event.kind == wire.RESUMED:
            step = int(event.data.get("step") or 0)
            if found and not since:
                found[-1]["step"] = step
        elif event.kind == wire.WORLD:
            world = formed[event.time]
            if before is not None:
                scaled = world.nodes != before
                label = f"{before} → {world.nodes} nodes" if scaled else "restart"
                text = f"world {world.number}, {world.nodes} nodes{f': {world.why}' if world.why else ''}"
                found.append({"step": step, "time": event.time, "kind": "scale" if scaled else "restart", "label": label, "text": text})
                since = False
            before = world.nodes
        elif event.kind == wire.VERDICT and event.data.get("status") == "failed":
            found.append({"step": step, "time": event.time, "kind": "failed", "label": "failed", "text": str(event.data.get("why", ""))})
    return found


def facts(story: Iterable[Event]) -> list[Data]:
    """Return what the nodes told of themselves at the start, a row a fact: its name, and which nodes say what."""
    newest = {str(event.data.get("node", "")): event.data for event in story if event.kind == wire.REPORT}
    rows: dict[str, dict[str, list[str]]] = {}
    for node, told in newest.items():
        for name, value in _flat({key: value for key, value in told.items() if key != "node"}):
            rows.setdefault(name, {}).setdefault(value, []).append(node)
    return [{"name": name, "values": [{"value": value, "nodes": nodes} for value, nodes in told.items()]} for name, told in rows.items()]


def finite(value: Any) -> Any:
    """Return a value with None for every number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _flat(item, f"{name}.")
        else:
            yield name, ", ".join(map(str, item)) if isinstance(item, list | tuple) else str(item)


def _is_down(stands: Status) -> bool:
    return stands.ended is None and bool(stands.tasks) and all(task.state == "down" for task in stands.tasks)


def _last_time(story: Sequence[Event]) -> float | None:
    return story[-1].time if story else None


def _nodes(stands: Status, story: Iterable[Event], now: float) -> list[Data]:
    joined = {str(event.data.get("node")): event.data for event in story if event.kind == wire.JOINED}
    ranks = stands.world.get("ranks") or {}
    found = []
    for task in stands.tasks:
        if task.node == wire.RENDEZVOUS and not task.reason:
            continue
        again, out = stands.restarts.get(task.node), stands.left_out.get(task.node)
        here = joined.get(task.node, {})
        used = stands.usage.get(task.node, {}) if task.state == "running" else {}
        cares = [
            *([task.reason] if task.reason else []),
            *([f"left out: {out.why}"] if out else []),
            *([str(stands.straggler.get("message", ""))] if stands.straggler.get("node") == task.node else []),
            *(
                f"GPU {number} has {gpu['temperature']:.0f} °C"
                for number, gpu in enumerate(used.get("gpus") or [])
                if (gpu.get("temperature") or 0) >= _HOT
            ),
        ]
        lately = again is not None and stands.ended is None and now - again.time < _RECENT
        found.append(
            {
                "node": task.node,
                "host": task.host or str(here.get("host", "")),
                "state": task.state,
                "health": _health(task, bool(cares) or lately),
                "cares": cares,
                "address": here.get("address"),
                "interface": here.get("interface"),
                "ranks": ranks.get(task.node, []),
                "restarts": {"count": again.count, "time": again.time, "why": again.why} if again else None,
                **used,
                "gpus": used.get("gpus") or [],
                "reserved": list(task.gpus),
            }
        )
    return found


def _health(task: TaskState, care: bool) -> str:
    """Return ok, warn, bad or off."""
    if task.state in ("failed", "rejected", "dead"):
        return "bad"
    if task.state in _OFF:
        return "off"
    return "warn" if care or task.state != "running" else "ok"


def _links(story: Iterable[Event]) -> list[Data]:
    """Return the newest measurement of each pair."""
    newest = {(event.data.get("a"), event.data.get("b")): {**event.data, "time": event.time} for event in story if event.kind == wire.LINK}
    return list(newest.values())
