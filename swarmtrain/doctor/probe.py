"""A probe on every node: a run of its own in the job's image, network, mounts and reservations, and gone after seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace

from swarmtrain import wire
from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.doctor.probed import Probed
from swarmtrain.errors import RunNotFound
from swarmtrain.launchers.base import Launcher, Say, TaskState
from swarmtrain.plan import Plan, probe_name
from swarmtrain.wire import Event

_PATIENCE = 300.0


def run_probe(place: Launcher, plan: Plan, say: Say, *, reserve: bool = True) -> Probed:
    """Probe the nodes of `plan`, and return what they told; whatever happens, the probe is taken down.

    What the plan reserves is held by another run unless `reserve`: the probe then looks on without, and does not wait for it.
    Raises StackError if it cannot be started.
    """
    probe = replace(plan, run=probe_name(plan.run), probe=True, config=plan.config if reserve else _onlooker(plan.config))
    if not reserve:
        say("the GPUs are held by a run: the probe looks at the nodes without reserving any")
    if plan.run in place.runs():
        say(f"{plan.run} is up: it goes on, and shares its nodes with the probe for some seconds")
    say(f"probing {len(plan.nodes)} nodes, as run {probe.run}")
    try:
        place.up(probe, say)
        return _collect(place, plan, probe.run, say)
    finally:
        with contextlib.suppress(RunNotFound):  # what did not start was taken back already
            place.down(probe.run, lambda _: None)


def _onlooker(config: Config) -> Config:
    """Return the config of a run that sees the GPUs and reserves none."""
    swarm = config.runner.swarm.model_copy(update={"gpu": GpuMode.visible})
    return config.model_copy(update={"runner": config.runner.model_copy(update={"swarm": swarm})})


def _collect(place: Launcher, plan: Plan, probe: str, say: Say) -> Probed:
    end = time.monotonic() + _PATIENCE
    events: list[Event] = []
    states: dict[str, str] = {}
    verdict = ""
    for update in place.watch(probe):
        if isinstance(update, Event):
            events.append(update)
            if update.kind == wire.VERDICT and update.data["status"] != "done":
                verdict = update.data["why"]
            if line := _progress(update):
                say(line)
        elif isinstance(update, TaskState):
            states[update.node] = f"{update.state}: {update.reason}" if update.reason else update.state
        if _of(events, wire.TOGETHER).keys() >= {node.name for node in plan.nodes} or time.monotonic() > end:
            break
    links = tuple(event.data for event in events if event.kind == wire.LINK)
    return Probed(plan, _of(events, wire.PROBE), links, _of(events, wire.TOGETHER), verdict, states)


def _of(events: Iterable[Event], kind: str) -> dict[str, dict[str, object]]:
    return {str(event.data["node"]): event.data for event in events if event.kind == kind}


def _progress(event: Event) -> str:
    match event.kind:
        case wire.PROBE:
            return f"{event.data['node']} has looked around"
        case wire.LINK:
            return f"{event.data['a']} and {event.data['b']} have measured their link"
        case wire.TOGETHER:
            return f"{event.data['node']} has met the others"
    return ""
