"""doctor: what keeps a job from running here, or will hurt it. Cheap questions first, then a probe in the job's own place.

checks      what a check is
cluster     what the managers can tell: of the swarm, and
capacity    of the machines that the plan uses
probed      what probes tell that ran on every node, in the job's image, network, mounts and reservations:
inside      of the nodes, and
between     of their links
report      the answers
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from swarmtrain import wire
from swarmtrain.config.runner import RunnerType
from swarmtrain.doctor import between, capacity, cluster, inside, probed  # noqa: F401  # checks register themselves
from swarmtrain.doctor.checks import Checks, Seen
from swarmtrain.doctor.probed import Probed
from swarmtrain.doctor.report import Answer, Report
from swarmtrain.errors import RunNotFound, StackError
from swarmtrain.launchers.base import Finding, Launcher, Say, TaskState
from swarmtrain.launchers.engine import Engine
from swarmtrain.plan import Plan
from swarmtrain.wire import Event

_SUFFIX = "-probe"
_PATIENCE = 180.0


def examine_cluster(say: Say) -> Report:
    """Ask the swarm's managers about itself, whatever is to run on it. Raises EngineError if none answers."""
    say("asking the managers")
    return Report(tuple(_answers(cluster.CHECKS, cluster.look(Engine(), None))))


def examine(place: Launcher, plan: Plan, say: Say, *, probe: bool = True) -> Report:
    """Ask whatever there is to ask about `plan`; a swarm's nodes are probed only if nothing cheaper is in the way.

    A probe is a run of its own, for seconds, and nothing of it is left. Raises SwarmtrainError.
    """
    answers: list[Answer] = []
    swarm = plan.config.runner.runner_type is RunnerType.swarm
    if swarm:
        say("asking the managers")
        answers += _answers(cluster.CHECKS, cluster.look(Engine(), plan))
    answers.append(Answer("plan", "nothing stands in the way of a deploy", tuple(place.check(plan))))
    report = Report(tuple(answers))
    if report.fatal or not (probe and swarm):
        return report
    seen, failed = _probe(place, plan, say)
    if failed:
        return Report((*answers, Answer("start", "the job's services can be started", (failed,))))
    return Report((*answers, *_answers(probed.CHECKS, seen)), seen)


def _answers(checks: Checks[Seen], seen: Seen) -> Iterator[Answer]:
    for check in checks.all:
        yield Answer(check.name, check.asks, tuple(check.find(seen)))


def _probe(place: Launcher, plan: Plan, say: Say) -> tuple[Probed, Finding | None]:
    """Run a probe on every node of `plan`; return what came of it, and what kept it from starting."""
    ours = replace(plan, run=_name(plan.run), probe=True)
    say(f"probing {len(plan.nodes)} nodes, as run {ours.run}")
    try:
        place.up(ours, say)
        return _collect(place, ours, say), None
    except StackError as error:
        why = "the job's own would not start either"
        return Probed(ours), Finding(error.place or ours.run, error.message, error.hint, why=why)
    finally:
        with contextlib.suppress(RunNotFound):  # what did not start was taken back already
            place.down(ours.run, lambda _: None)


def _name(run: str) -> str:
    """Return the probe's own name: a run of its own beside the one that may be up; cut where names have their end."""
    longest = 46
    return run[: longest - len(_SUFFIX)].rstrip("-") + _SUFFIX


def _collect(place: Launcher, plan: Plan, say: Say) -> Probed:
    end = time.monotonic() + _PATIENCE
    events: list[Event] = []
    states: dict[str, str] = {}
    verdict = ""
    for update in place.watch(plan.run):
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
