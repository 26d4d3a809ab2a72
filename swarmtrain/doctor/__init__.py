"""doctor: what keeps a job from running here, or will hurt it. Cheap questions first, then a probe in the job's own place.

checks      what a check is
cluster     what the managers can tell: of the swarm, and
capacity    of the machines that the plan uses
probe       a probe on every node, started and taken down
probed      what probes tell that ran on every node, in the job's image, network, mounts and reservations:
inside      of the nodes,
gpus        of their GPUs, and
links       of how they reach each other
report      the answers
"""

from __future__ import annotations

from collections.abc import Iterator

from swarmtrain.config.runner import RunnerType
from swarmtrain.doctor import capacity, cluster, gpus, inside, links, probed  # noqa: F401  # checks register themselves
from swarmtrain.doctor.checks import Checks, Seen
from swarmtrain.doctor.probe import run_probe
from swarmtrain.doctor.report import Answer, Report
from swarmtrain.errors import StackError
from swarmtrain.launchers.base import Finding, Launcher, Say
from swarmtrain.launchers.engine import Engine
from swarmtrain.plan import Plan


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
    try:
        seen = run_probe(place, plan, say)
    except StackError as error:
        failed = Finding(error.place or "stack", error.message, error.hint, why="the job's own services would not start either")
        return Report((*answers, Answer("start", "the job's services can be started", (failed,))))
    return Report((*answers, *_answers(probed.CHECKS, seen)), seen)


def _answers(checks: Checks[Seen], seen: Seen) -> Iterator[Answer]:
    for check in checks.all:
        yield Answer(check.name, check.asks, tuple(check.find(seen)))
