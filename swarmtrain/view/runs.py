"""What a person sees of a run that comes up, is followed, or is scaled: the launcher acts, this tells."""

from __future__ import annotations

import os
import time

from swarmtrain import wire
from swarmtrain.errors import EXIT_INTERRUPTED, EXIT_JOB_FAILED, EXIT_OK, StackError, SwarmtrainError
from swarmtrain.launchers import kept
from swarmtrain.launchers.base import Launcher, Say
from swarmtrain.plan import Plan
from swarmtrain.view.console import progress, say, show_finding
from swarmtrain.view.data import show, show_json
from swarmtrain.view.look import why_of
from swarmtrain.view.stream import event_line, follow
from swarmtrain.wire import Verdict

_NEW_WORLD_SECONDS = 180.0


def show_plan(place: Launcher, plan: Plan, *, as_json: bool) -> None:
    """Show the plan and, if the run is up, what bringing it up again would change."""
    up = plan.run in place.runs()
    changes = [str(change) for change in place.changes(plan)] if up else []
    if as_json:
        show_json({**plan.to_dict(), "up": up, "changes": changes})
        return
    show(plan, as_json=False)
    if up:
        say(f"{plan.run} is up; a deploy would change {'this:' if changes else 'nothing'}")
        for change in changes:
            say(f"  {change}")


def bring_up(place: Launcher, plan: Plan) -> None:
    """Show the plan, check it, and make it so. Raises StackError if a check finds what would keep it from running."""
    say(str(plan))
    findings = place.check(plan)
    fatal = [finding for finding in findings if finding.fatal]
    for finding in findings:
        if finding not in fatal[-1:]:
            show_finding(finding)
    if fatal:
        raise StackError(fatal[-1].message, place=fatal[-1].place, hint=fatal[-1].hint)
    try:
        with progress(f"bringing {plan.run} up") as step:
            place.up(plan, step)
        kept.mark(plan.run, "up", nodes=len(plan.nodes))
    except KeyboardInterrupt:
        say(f"interrupted: {_what_is_left(place, plan.run)}")
        raise


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


def rescale(place: Launcher, plan: Plan) -> None:
    """Bring a run to its new plan and return when the new world has formed. Raises StackError if none does in time."""
    seen = len(place.events(plan.run))
    bring_up(place, plan)
    with progress(
        f"waiting for a world of {len(plan.nodes)} nodes", interrupted=f"{plan.run} goes on; swarmtrain status {plan.run}"
    ) as step:
        _await_world(place, plan, seen, step)


def _await_world(place: Launcher, plan: Plan, seen: int, step: Say) -> None:
    end = time.monotonic() + _NEW_WORLD_SECONDS
    while time.monotonic() < end:
        events = place.events(plan.run)
        for event in events[seen:]:
            line = event_line(event)
            if line:
                step(line)
            if event.kind == wire.VERDICT:
                step("the run ended before that")
                return
            if event.kind == wire.WORLD and event.data.get("nodes") == len(plan.nodes):
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
    with progress(f"stopping {run}", interrupted=f"swarmtrain stop {run} again waits for what still runs") as step:
        place.stop(run, step)
    kept.mark(run, "stop")


def take_down(place: Launcher, run: str) -> None:
    """Remove a run, and note that, so that what is kept of it is not taken for the next one's."""
    with progress(f"taking {run} down", interrupted=f"swarmtrain down {run} again removes what is left") as step:
        place.down(run, step)
    kept.mark(run, "down")
