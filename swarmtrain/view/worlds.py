"""Events → the worlds of a run: which nodes trained together from when, and why each one came after the last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmtrain import wire
from swarmtrain.wire import EXIT_PLANNED, Event, collateral


@dataclass(frozen=True)
class World:
    """One world. `number` counts from 1; `why` is empty for the first."""

    number: int
    time: float
    nodes: int
    ranks: int
    why: str = ""


@dataclass(frozen=True)
class Restart:
    """That ranks of a node were started again: how often, when the last time, and why then."""

    count: int
    time: float
    why: str


@dataclass(frozen=True)
class LeftOut:
    """That a node sits out, since it failed again and again. `until` is in seconds since the epoch."""

    until: float
    why: str


def worlds(events: Iterable[Event]) -> list[World]:
    """Return the worlds that have formed, in order."""
    found: list[World] = []
    between: list[Event] = []
    before: set[str] = set()
    for event in events:
        if event.kind == wire.WORLD:
            nodes, ranks = int(event.data.get("nodes", 0)), int(event.data.get("world_size", 0))
            members = set(event.data.get("ranks") or ())
            why = why_anew(between) or _difference(before, members) if found else ""
            found.append(World(len(found) + 1, event.time, nodes, ranks, why))
            between, before = [], members
        elif event.kind in _REASONS:
            between.append(event)
    return found


def why_anew(between: Sequence[Event]) -> str:
    """Return what among the events since the last world is the reason for a new one; nothing if none tells."""
    ranked = sorted(between, key=_weight)
    return next((text for event in ranked if (text := reason(event))), "")


def reason(event: Event) -> str:
    """Return what an event says of why ranks are started anew; nothing if it is no reason for that."""
    node = str(event.data.get("node", "a node"))
    if event.kind == wire.FAILURE:
        return failure_line(event.data)
    if event.kind == wire.LEFT and event.data.get("exit_code") is None:
        return f"{node} fell silent"
    if event.kind == wire.LEFT and event.data.get("exit_code") == EXIT_PLANNED:
        return f"{node} was told to leave"
    if event.kind == wire.LEFT and event.data.get("exit_code"):
        return f"{node} left with exit code {event.data['exit_code']}"
    if event.kind == wire.BOARD_UP:
        return "the notice board was started again"
    return f"{node} came" if event.kind in (wire.JOINED, wire.LET_IN) else ""


def failure_line(data: Mapping[str, Any]) -> str:
    """Return a failure's data as `node1 rank 3 failed: its reason`."""
    who = f"{data.get('node')} rank {data['rank']}" if data.get("rank") is not None else f"{data.get('node')}"
    how = data.get("signal") or f"exit code {data.get('exit_code')}"
    return f"{who} failed: {data.get('error') or how}"


def restarts(events: Iterable[Event]) -> dict[str, Restart]:
    """Return, by node, how often something there made ranks start again, and why the last time."""
    found: dict[str, Restart] = {}
    here: set[str] = set()
    for event in events:
        node = str(event.data.get("node", ""))
        why = ""
        if event.kind == wire.JOINED:
            why = "its container was started again" if node in here else ""
            here.add(node)
        elif event.kind == wire.LEFT and event.data.get("exit_code") == EXIT_PLANNED:
            here.discard(node)  # what comes back then was asked to
        elif event.kind == wire.FAILURE and not collateral(event.data):
            why = str(event.data.get("error") or event.data.get("signal") or f"exit code {event.data.get('exit_code')}")
        if why:
            found[node] = Restart(found[node].count + 1 if node in found else 1, event.time, why)
    return found


def left_out(events: Iterable[Event]) -> dict[str, LeftOut]:
    """Return, by node, which sit out."""
    found: dict[str, LeftOut] = {}
    for event in events:
        if event.kind == wire.LEFT_OUT:
            found[str(event.data["node"])] = LeftOut(event.time + float(event.data["seconds"]), str(event.data["why"]))
        elif event.kind == wire.LET_IN or (event.kind == wire.LEFT and event.data.get("exit_code") == EXIT_PLANNED):
            found.pop(str(event.data["node"]), None)
        elif event.kind in (wire.BOARD_UP, wire.VERDICT):
            found.clear()
    return found


def _difference(before: set[str], members: set[str]) -> str:
    """Return which nodes are new in a world; one may have come before the last world, and too late for it."""
    new = ", ".join(sorted(members - before)) if before else ""
    return f"{new} came" if new else ""


_REASONS = {wire.FAILURE, wire.LEFT, wire.BOARD_UP, wire.JOINED, wire.LET_IN}


def _weight(event: Event) -> int:
    """Return how far down in the list of reasons this one stands."""
    if event.kind == wire.FAILURE:
        return 3 if collateral(event.data) else 0
    if event.kind == wire.LEFT:
        return 1
    return 2 if event.kind == wire.BOARD_UP else 4
