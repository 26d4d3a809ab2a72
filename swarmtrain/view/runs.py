"""What a person sees of a run that comes up, is followed, or is scaled: the launcher acts, this tells."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from swarmtrain import wire
from swarmtrain.errors import EXIT_INTERRUPTED, EXIT_JOB_FAILED, EXIT_OK, StackError, SwarmtrainError
from swarmtrain.launchers import deployed, kept
from swarmtrain.launchers.base import Change, Launcher, Say
from swarmtrain.launchers.checkout import checkout
from swarmtrain.plan import Plan
from swarmtrain.view.changes import differences
from swarmtrain.view.console import confirm, progress, say, show_finding
from swarmtrain.view.data import show, show_json
from swarmtrain.view.look import why_of
from swarmtrain.view.stream import event_line, follow
from swarmtrain.view.times import counted
from swarmtrain.view.worlds import left_out
from swarmtrain.wire import Event, Verdict

_NEW_WORLD_SECONDS = 180.0


def show_plan(place: Launcher, plan: Plan, *, as_json: bool) -> None:
    """Show the plan and, if the run is up, what bringing it up again would change."""
    if not as_json:
        show(plan, as_json=False)
    up = plan.run in place.runs()
    changes, impossible = _changes(place, plan) if up else ([], None)
    different = _different(place, plan, changes) if changes or impossible else []
    if as_json:
        show_json({**plan.to_dict(), "up": up, "differences": different, "changes": [str(change) for change in changes]})
    elif up:
        say(f"{plan.run} is up; a deploy would change {'this:' if changes or impossible else 'nothing'}")
        for line in different:
            say(f"  {line}")
        for change in changes:
            say(f"  - {change}")
    if impossible:
        raise impossible


def _changes(place: Launcher, plan: Plan) -> tuple[Sequence[Change], StackError | None]:
    """Return what bringing `plan` up would do, or why that cannot be done to the run as it is."""
    try:
        return place.changes(plan), None
    except StackError as error:
        return [], error


def _different(place: Launcher, plan: Plan, changes: Sequence[Change]) -> list[str]:
    """Return how `plan` differs from what the run was brought up with; nothing where that cannot be read any more."""
    try:
        config, cargo = deployed(place, plan.run)
    except StackError as error:
        return [str(error)]
    return differences(plan, config, cargo, place.tasks(plan.run), sum(change.interrupts for change in changes))


def attach(place: Launcher, plan: Plan, rank: int) -> int:
    """Show the plan, and run it on this machine with `rank` in this terminal; return that rank's exit code. Raises PlanError."""
    from swarmtrain.launchers.local.attach import attach as run

    _show_and_check(place, plan)
    return run(plan, rank, say)


def bring_up(place: Launcher, plan: Plan, *, yes: bool) -> None:
    """Show the plan, check it, and make it so; a person is asked first if that restarts what runs, unless `yes`.

    Raises StackError if a check finds what would keep it from running, if the answer is no, or if nobody can be asked.
    """
    _show_and_check(place, plan)
    if plan.run in place.runs():
        _ask(place, plan, yes=yes)
    try:
        found = checkout(Path.cwd())
        kept.mark(plan.run, "up", nodes=len(plan.nodes), **({"code": str(found)} if found else {}))
        kept.keep_diff(plan.run, found.diff if found else "")
        with progress(f"bringing {plan.run} up") as step:
            place.up(plan, step)
    except KeyboardInterrupt:
        say(f"interrupted: {_what_is_left(place, plan.run)}")
        raise


def _show_and_check(place: Launcher, plan: Plan) -> None:
    say(str(plan))
    findings = place.check(plan)
    fatal = [finding for finding in findings if finding.fatal]
    for finding in findings:
        if finding not in fatal[-1:]:
            show_finding(finding)
    if fatal:
        raise StackError(fatal[-1].message, place=fatal[-1].place, hint=fatal[-1].hint)


def _ask(place: Launcher, plan: Plan, *, yes: bool) -> None:
    changes = place.changes(plan)
    restarting = counted(sum(change.interrupts for change in changes), "service")
    if not any(change.interrupts for change in changes):
        return
    say(f"{plan.run} runs; this changes:")
    for line in _different(place, plan, changes):
        say(f"  {line}")
    if yes:
        return
    asked = confirm(f"restart {restarting} of {plan.run}?")
    if asked is None:
        raise StackError(
            f"this would restart {restarting}, and there is no terminal to ask at",
            place=f"run {plan.run}",
            hint="the same command with --yes does it",
        )
    if not asked:
        raise StackError("left as it is", place=f"run {plan.run}")


def _what_is_left(place: Launcher, run: str) -> str:
    try:
        there = run in (*place.runs(), *place.leaving())
    except SwarmtrainError:
        return f"swarmtrain status {run} shows what is there"
    return f"the same command again makes the rest of the change; swarmtrain down {run} removes it" if there else "nothing of it is left"


def follow_to_the_end(place: Launcher, run: str, *, as_json: bool) -> int:
    """Follow `run` and return the exit code that its verdict means."""
    try:
        say(f"following {run}; Ctrl-C detaches, the job goes on")
        verdict = follow(place.watch(run))
    except KeyboardInterrupt:
        say(f"\ndetached; {run} goes on\nhint: swarmtrain status {run} | logs -f {run} | down {run}")
        return EXIT_INTERRUPTED
    stopped = verdict is None and run in place.runs()
    if as_json:
        show_json(
            {
                "run": run,
                "status": verdict.status if verdict else "stopped" if stopped else "gone",
                "why": verdict.why if verdict else "",
                "exit_code": verdict.exit_code if verdict else None,
            }
        )
    if verdict is None:
        said = f"stopped before it ended\nhint: deploying {run} again resumes it" if stopped else "taken down before it ended"
        say(f"{run} was {said}")
        return EXIT_JOB_FAILED
    if verdict.done:
        say(f"{run} is done\nhint: swarmtrain down {run} removes its services; checkpoints stay")
        return EXIT_OK
    _tell_why(place, run, verdict)
    return EXIT_JOB_FAILED


def _tell_why(place: Launcher, run: str, verdict: Verdict) -> None:
    """Tell how the run failed: on a terminal, where it has scrolled away by now, on one screen; elsewhere in short."""
    try:
        found = why_of(place, run)
    except SwarmtrainError:  # what was followed to its end was told
        found = None
    if found is not None and os.isatty(2):
        say(str(found))
    say(f"{run} failed with exit code {verdict.exit_code}: {verdict.why}")
    if found is not None and found.means:
        say(f"means: {found.means}")
    for hint in dict.fromkeys((verdict.hint, found.fix if found else "", f"swarmtrain why {run} shows what came before")):
        if hint:
            say(f"hint: {hint}")


def rescale(place: Launcher, plan: Plan, *, yes: bool) -> None:
    """Bring a run to its new plan and return when the new world has formed. Raises StackError if none does in time."""
    before = place.events(plan.run)
    seen = len(before)
    if _trains_on(before, len(plan.nodes)) and not place.changes(plan):
        say(f"{plan.run} trains on {counted(len(plan.nodes), 'node')} already")
        return
    bring_up(place, plan, yes=yes)
    with progress(
        f"waiting for a world of {len(plan.nodes)} nodes", interrupted=f"{plan.run} goes on; swarmtrain status {plan.run}"
    ) as step:
        _await_world(place, plan, seen, step)


def _trains_on(events: Sequence[Event], nodes: int) -> bool:
    ends = [event for event in events if event.kind in (wire.WORLD, wire.VERDICT)]
    return bool(ends) and ends[-1].kind == wire.WORLD and ends[-1].data.get("nodes") == nodes


def _await_world(place: Launcher, plan: Plan, seen: int, step: Say) -> None:
    end = time.monotonic() + _NEW_WORLD_SECONDS
    while time.monotonic() < end:
        events = place.events(plan.run)
        seen = seen if seen <= len(events) else 0  # a new board begins at the beginning
        for event in events[seen:]:
            line = event_line(event)
            if line:
                step(line)
            if event.kind == wire.VERDICT:
                step("the run ended before that")
                return
            if event.kind == wire.WORLD and event.data.get("nodes") == len(plan.nodes) - len(left_out(events)):
                return
        seen = max(seen, len(events))
        time.sleep(1)
    raise StackError(
        f"no world of {len(plan.nodes)} nodes within {_NEW_WORLD_SECONDS:.0f} s",
        place=f"run {plan.run}",
        hint=f"swarmtrain status {plan.run}",
    )


def stop(place: Launcher, run: str) -> None:
    """Let the ranks save and leave, and wait for that."""
    with progress(f"stopping {run} on {place.where}", interrupted=f"swarmtrain stop {run} again waits for what still runs") as step:
        place.stop(run, step)
        kept.mark(run, "stop")


def take_down(place: Launcher, run: str) -> None:
    """Remove a run, and note that, so that what is kept of it is not taken for the next one's."""
    with progress(f"taking {run} down on {place.where}", interrupted=f"swarmtrain down {run} again removes what is left") as step:
        place.down(run, step)
        kept.mark(run, "down")
