"""Deploy, follow, scale, stop and remove a run. The launcher makes the changes; this module prints the progress for the user."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from swarmtrain import protocol
from swarmtrain.errors import (
    EXIT_INTERRUPTED,
    EXIT_JOB_FAILED,
    EXIT_OK,
    ResourcesReserved,
    RunNotFound,
    StackError,
    SwarmtrainError,
)
from swarmtrain.launchers.base import QUEUED_STATE, Change, ClusterInspector, Finding, Launcher, ProgressReporter, exclude_unusable_hosts
from swarmtrain.launchers.common.history_store import build_operation_event, find_recorded_run
from swarmtrain.launchers.common.provenance import read_git_checkout
from swarmtrain.launchers.registry import load_deployment
from swarmtrain.launchers.run_discovery import find_recorded_run_of, find_run
from swarmtrain.operations.confirmation import confirm_change
from swarmtrain.planning.plan import Plan
from swarmtrain.planning.step_estimates import StepEstimates, estimate_steps
from swarmtrain.protocol import Event, RunOutcome
from swarmtrain.view.console import print_message, show_finding, show_progress
from swarmtrain.view.deploy_diff import list_differences
from swarmtrain.view.estimates.step_time import build_estimate_records, format_estimates
from swarmtrain.view.formatting import format_count, remove_control_characters
from swarmtrain.view.output import print_json, print_result
from swarmtrain.view.run_state import diagnose_live_run, load_live_run_events, summarize_past_run
from swarmtrain.view.update_printer import follow_updates, format_event
from swarmtrain.view.worlds import find_quarantined_nodes

_WORLD_TIMEOUT_SECONDS = 180.0
# States of a node that its machine refuses to start: Swarm retries it.
_REFUSED_STATES = ("pending", "rejected")
# Seconds that a scheduler has for new nodes before they count as waiting in its queue.
_QUEUE_SECONDS = 10.0
_RESERVATION_POLL_SECONDS = 5.0


def show_plan(launcher: Launcher, plan: Plan, *, as_json: bool) -> None:
    """Print the plan and, if the run is already deployed, the changes that deploying `plan` would make.

    Raises StackError if the run's current state does not allow these changes.
    """
    estimates = _estimate_steps(launcher, plan)
    if not as_json:
        print_result(plan, as_json=False)
        for line in format_estimates(estimates) if estimates else ():
            print_message(f"  {line}")
    is_up = plan.run in launcher.list_runs()
    identity = launcher.read_identity(plan.run) if is_up else None
    changes, blocker = _compute_deploy_changes(launcher, plan) if is_up else ([], None)
    difference_lines = _describe_plan_differences(launcher, plan, changes) if changes or blocker else []
    if as_json:
        owner = identity.owner if identity else None
        print_json(
            {
                **plan.to_dict(),
                "step_estimates": build_estimate_records(estimates) if estimates else None,
                "up": is_up,
                "owner": owner,
                "differences": difference_lines,
                "changes": [str(change) for change in changes],
            }
        )
    elif identity:
        owner = "" if identity.is_own else f", the run of {identity.owner_text}"
        print_message(f"{plan.run} is up{owner}; a deploy would change {'this:' if changes or blocker else 'nothing'}")
        for line in difference_lines:
            print_message(f"  {line}")
        for change in changes:
            print_message(f"  - {change}")
    if blocker:
        raise blocker


def _estimate_steps(launcher: Launcher, plan: Plan) -> StepEstimates | None:
    """Return the estimated times per step of `plan`; None if the launcher keeps no measurements."""
    return estimate_steps(plan, launcher.read_measurements()) if isinstance(launcher, ClusterInspector) else None


def _compute_deploy_changes(launcher: Launcher, plan: Plan) -> tuple[Sequence[Change], StackError | None]:
    """Return the changes that deploying `plan` would make, and the error that prevents these changes in the run's current state, if any."""
    try:
        return launcher.plan_changes(plan), None
    except StackError as error:
        return [], error


def _describe_plan_differences(launcher: Launcher, plan: Plan, changes: Sequence[Change]) -> list[str]:
    """Return the differences between `plan` and the run as deployed, one per line; if the deployed config cannot be read, the error."""
    try:
        config, cargo = load_deployment(launcher, plan.run)
    except StackError as error:
        return [str(error)]
    events = load_live_run_events(launcher, plan.run)
    return list_differences(
        plan,
        config,
        cargo,
        launcher.list_tasks(plan.run),
        sum(change.interrupts_run for change in changes),
        has_checkpoint=any(event.kind in (protocol.EVENT_CHECKPOINT, protocol.EVENT_RESUMED) for event in events),
    )


def run_plan_attached(launcher: Launcher, plan: Plan, rank: int) -> int:
    """Print the plan and run it on this machine, with `rank` attached to this terminal. Return the exit code of `rank`.

    Raises PlanError if the plan does not contain `rank`.
    """
    from swarmtrain.launchers.local.attached_rank import attach_rank

    _show_and_check_plan(launcher, plan)
    return attach_rank(plan, rank, print_message)


def deploy_run(launcher: Launcher, plan: Plan, *, assume_yes: bool, wait: bool = False) -> Plan:
    """Print, check and deploy the plan, and return it as deployed. `wait`: while other runs have reserved its GPUs, try again.

    If the deploy restarts something that is running, or changes the run of somebody else, the user must confirm it, unless `assume_yes`.
    Hosts on which a check finds a fatal problem are missing, if enough are left. Raises StackError if a check returns another fatal
    finding, or if the user declines; ResourcesReserved if GPUs are not free, unless `wait`; ConfirmationRequired if there is no terminal to
    confirm on.
    """
    plan = _show_and_check_plan(launcher, plan)
    if plan.run in launcher.list_runs():
        changes = launcher.plan_changes(plan)
        if not changes:
            print_message(f"{plan.run} is up to date: nothing has changed")
            return plan
        _confirm_changes(launcher, plan, changes, assume_yes=assume_yes)
    try:
        git_checkout = read_git_checkout(Path.cwd())
        event = build_operation_event("up", nodes=len(plan.nodes), **({"code": str(git_checkout)} if git_checkout else {}))
        with show_progress(f"deploying {plan.run}") as report_progress:
            _deploy_when_free(launcher, plan, report_progress, wait=wait)
        recorded_run = find_recorded_run_of(launcher, plan.run)
        recorded_run.record_operation(event)
        recorded_run.save_config(plan.config)
        recorded_run.save_git_diff(git_checkout.diff if git_checkout else "")
    except KeyboardInterrupt:
        print_message(f"interrupted: {_describe_remaining_run(launcher, plan.run)}")
        raise
    return plan


def _deploy_when_free(launcher: Launcher, plan: Plan, report_progress: ProgressReporter, *, wait: bool) -> None:
    """Deploy `plan`. With `wait`, try again while GPUs are not free; nothing is reserved meanwhile, so a later run may be faster."""
    reported = ""
    while True:
        try:
            launcher.deploy_run(plan, report_progress)
        except ResourcesReserved as error:
            if not wait:
                raise
            if error.message != reported:
                report_progress(f"waiting: {error.message}")
            reported = error.message
            time.sleep(_RESERVATION_POLL_SECONDS)
        else:
            return


def _show_and_check_plan(launcher: Launcher, plan: Plan) -> Plan:
    """Print the plan and the findings about it, and return the plan without the hosts that cannot be used. Raises StackError."""
    print_message(str(plan))
    findings = [*launcher.check_plan(plan), *_check_queue_request(launcher, plan)]
    usable_plan = exclude_unusable_hosts(plan, findings)
    if usable_plan.can_form_world:
        findings = [replace(finding, fatal=finding.fatal and not finding.host) for finding in findings]
    fatal = [finding for finding in findings if finding.fatal]
    for finding in findings:
        if finding not in fatal[-1:]:
            show_finding(finding)
    if fatal:
        raise StackError(fatal[-1].message, place=fatal[-1].place, hint=fatal[-1].hint)
    if usable_plan != plan:
        names = ", ".join(sorted({node.host for node in plan.available_nodes} - {node.host for node in usable_plan.available_nodes}))
        print_message(f"deploying without {names}: {format_count(len(usable_plan.available_nodes), 'node')} of {len(plan.nodes)} can start")
    return usable_plan


def _check_queue_request(launcher: Launcher, plan: Plan) -> list[Finding]:
    """Return what keeps `plan` from starting in the queue of a swarm. Other launchers do not import the queue."""
    if not plan.config.runner.capabilities.has_managers:
        return []
    from swarmtrain.queueing.request_checks import check_queue_request

    return check_queue_request(launcher, plan)


def _confirm_changes(launcher: Launcher, plan: Plan, changes: Sequence[Change], *, assume_yes: bool) -> None:
    """Ask the user to confirm `changes` if they restart something, or if the run is somebody else's. Raises as confirm_change does."""
    interrupted_count = sum(change.interrupts_run for change in changes)
    if interrupted_count:
        print_message(f"{plan.run} is running; this deploy changes:")
        for line in _describe_plan_differences(launcher, plan, changes):
            print_message(f"  {line}")
    action = f"restart {format_count(interrupted_count, 'service')} of" if interrupted_count else "change"
    confirm_change(launcher, plan.run, action, must_ask=interrupted_count > 0, assume_yes=assume_yes)


def _describe_remaining_run(launcher: Launcher, run: str) -> str:
    try:
        exists = run in (*launcher.list_runs(), *launcher.list_terminating_runs())
    except SwarmtrainError:
        return f"swarmtrain status {run} shows what remains"
    return (
        f"run the same command again to complete the change; swarmtrain down {run} removes it" if exists else "no part of the run remains"
    )


def deploy_and_follow_run(launcher: Launcher, plan: Plan, *, assume_yes: bool, as_json: bool, wait: bool = False) -> int:
    """Deploy `plan` as `deploy_run` does, and follow the run without its events from before. Return the exit code for the command line."""
    newest_event_time = _read_newest_event_time(launcher, plan.run)
    deploy_run(launcher, plan, assume_yes=assume_yes, wait=wait)
    return _follow_run(launcher, plan.run, after=newest_event_time, as_json=as_json)


def _read_newest_event_time(launcher: Launcher, run: str) -> float:
    """Return the time of the newest event of `run`, by its coordinator's clock; 0 if the run does not exist or has no events."""
    try:
        events = launcher.read_events(run, tail=1) if run in launcher.list_runs() else []
    except SwarmtrainError:  # the deploy reports it
        events = []
    return events[-1].time if events else 0.0


def _follow_run(launcher: Launcher, run: str, *, after: float, as_json: bool) -> int:
    """Print the output and events of `run` until it ends, or the user detaches with Ctrl-C. Return the exit code for the command line.

    Events until the time `after` are not printed. The exit code is EXIT_OK if the run succeeded, EXIT_INTERRUPTED if the user detached,
    else EXIT_JOB_FAILED (failed, stopped or removed).
    """
    try:
        print_message(f"following {run}; Ctrl-C detaches, the job continues")
        outcome = follow_updates(launcher.watch_run(run), after=after)
    except KeyboardInterrupt:
        print_message(f"\ndetached; {run} continues\nhint: swarmtrain status {run} | logs -f {run} | down {run}")
        return EXIT_INTERRUPTED
    was_stopped = outcome is None and run in launcher.list_runs()
    if as_json:
        print_json(
            {
                "run": run,
                "status": outcome.status if outcome else "stopped" if was_stopped else "gone",
                "reason": outcome.reason if outcome else "",
                "exit_code": outcome.exit_code if outcome else None,
            }
        )
    if outcome is None:
        description = f"stopped before it ended\nhint: deploying {run} again resumes it" if was_stopped else "removed before it ended"
        print_message(f"{run} was {description}")
        return EXIT_JOB_FAILED
    if outcome.is_success:
        print_message(f"{run} is done\nhint: swarmtrain down {run} removes the run; checkpoints are kept")
        return EXIT_OK
    _explain_failure(launcher, run, outcome)
    return EXIT_JOB_FAILED


def _explain_failure(launcher: Launcher, run: str, outcome: RunOutcome) -> None:
    """Print why the run failed. On a terminal, first print the full diagnosis, because the failure itself may have scrolled away."""
    try:
        diagnosis = diagnose_live_run(launcher, run)
    except SwarmtrainError:  # the run's updates were already printed
        diagnosis = None
    if diagnosis is not None and os.isatty(2):
        print_message(remove_control_characters(str(diagnosis)))
    print_message(f"{run} failed with exit code {outcome.exit_code}: {remove_control_characters(outcome.reason)}")
    if diagnosis is not None and diagnosis.meaning:
        print_message(f"means: {diagnosis.meaning}")
    for hint in dict.fromkeys((outcome.hint, diagnosis.fix if diagnosis else "", f"swarmtrain why {run} shows the events that led to it")):
        if hint:
            print_message(f"hint: {remove_control_characters(hint)}")


def scale_run(launcher: Launcher, plan: Plan, *, assume_yes: bool) -> None:
    """Deploy the run's new plan, and wait until a world of all nodes that can start has formed.

    Raises StackError if no such world forms in time, or if the nodes of the run use another version of the protocol.
    """
    events = launcher.read_events(plan.run)
    _check_protocol(plan.run, events)
    seen_count = len(events)
    node_count = len(plan.available_nodes)
    if _is_training_on_node_count(events, node_count) and not launcher.plan_changes(plan):
        print_message(f"{plan.run} already trains on {format_count(node_count, 'node')}")
        return
    deployed = deploy_run(launcher, plan, assume_yes=assume_yes)
    with show_progress(
        f"waiting for a world of {format_count(len(deployed.available_nodes), 'node')}",
        interrupt_hint=f"{plan.run} continues; swarmtrain status {plan.run}",
    ) as report_progress:
        _wait_for_world(launcher, deployed, seen_count, report_progress)


def _check_protocol(run: str, events: Sequence[Event]) -> None:
    """Raise StackError if the newest coordinator of `run` uses another version of the protocol: new nodes could not join the others."""
    coordinator = next((event for event in reversed(events) if event.kind == protocol.EVENT_COORDINATOR_STARTED), None)
    if coordinator is not None and coordinator.data.get("protocol") != protocol.PROTOCOL_VERSION:
        raise StackError(
            "its nodes have another version of swarmtrain than this machine, so further nodes could not join them",
            place=f"run {run}",
            hint="scale it with that version, or replace all of its nodes: swarmtrain deploy CONFIG with an image of this version",
        )


def _is_training_on_node_count(events: Sequence[Event], node_count: int) -> bool:
    boundary_events = [event for event in events if event.kind in (protocol.EVENT_WORLD_FORMED, protocol.EVENT_OUTCOME)]
    return (
        bool(boundary_events)
        and boundary_events[-1].kind == protocol.EVENT_WORLD_FORMED
        and boundary_events[-1].data.get("nodes") == node_count
    )


def _wait_for_world(launcher: Launcher, plan: Plan, seen_event_count: int, report_progress: ProgressReporter) -> None:
    """Wait for a new world of all nodes of `plan` that can start, except those that are quarantined, or that their machines refuse."""
    deadline = time.monotonic() + _WORLD_TIMEOUT_SECONDS
    expected = {node.name for node in plan.available_nodes}
    world: set[str] | None = None
    queue_deadline = time.monotonic() + _QUEUE_SECONDS
    while time.monotonic() < deadline:
        if time.monotonic() > queue_deadline and (queued := _list_nodes_in_states(launcher, plan.run, (QUEUED_STATE,))):
            report_progress(f"{', '.join(sorted(queued))} of {plan.run} waits in the queue; swarmtrain queue status shows why")
            return
        events = launcher.read_events(plan.run)
        seen_event_count = seen_event_count if seen_event_count <= len(events) else 0  # a new coordinator's events start from zero
        for event in events[seen_event_count:]:
            line = format_event(event)
            if line:
                report_progress(line)
            if event.kind == protocol.EVENT_OUTCOME:
                report_progress("the run ended before the new world formed")
                return
            if event.kind == protocol.EVENT_WORLD_FORMED:
                world = set(event.data["ranks"])
        if world is not None and world <= expected:
            absent = expected - world - find_quarantined_nodes(events).keys()
            if not absent or absent <= _list_nodes_in_states(launcher, plan.run, _REFUSED_STATES):
                return
        seen_event_count = max(seen_event_count, len(events))
        time.sleep(1)
    raise StackError(
        f"did not form a world of {format_count(len(expected), 'node')} within {_WORLD_TIMEOUT_SECONDS:.0f} s",
        place=f"run {plan.run}",
        hint=f"swarmtrain status {plan.run}",
    )


def _list_nodes_in_states(launcher: Launcher, run: str, states: Collection[str]) -> set[str]:
    """Return the nodes of `run` whose tasks are in one of `states`."""
    return {task.node for task in launcher.list_tasks(run) if task.state in states}


def stop_run(launcher: Launcher, run: str, *, assume_yes: bool) -> None:
    """Request the ranks of `run` to save a checkpoint and exit, and wait until they have exited.

    If the run is somebody else's, the user must confirm it, unless `assume_yes`.
    """
    confirm_change(launcher, run, "stop", assume_yes=assume_yes)
    with show_progress(
        f"stopping {run} on {launcher.location}", interrupt_hint=f"swarmtrain stop {run} again waits for the remaining ranks"
    ) as report_progress:
        launcher.stop_run(run, report_progress)
        find_recorded_run_of(launcher, run).record_operation(build_operation_event("stop"))


def remove_named_run(name: str | None, *, assume_yes: bool) -> None:
    """Remove the run `name`, a name or an id, or the user's only run. A run that was already removed from this machine is only reported.

    If the run is somebody else's, the user must confirm it, unless `assume_yes`. Raises RunNotFound.
    """
    try:
        launcher, run = find_run(name)
    except RunNotFound:
        recorded_run = find_recorded_run(name) if name else None
        if recorded_run is None or not recorded_run.was_taken_down:
            raise
        print_message(f"{name} is already removed")
        return
    confirm_change(launcher, run, "remove", assume_yes=assume_yes)
    remove_run(launcher, run)


def remove_run(launcher: Launcher, run: str) -> None:
    """Remove a run and record the removal."""
    try:
        recorded_run = find_recorded_run_of(launcher, run)
    except RunNotFound:  # only parts of the run are left
        recorded_run = None
    with show_progress(
        f"removing {run} from {launcher.location}", interrupt_hint=f"swarmtrain down {run} again removes what is left"
    ) as report_progress:
        launcher.tear_down_run(run, report_progress)
        if recorded_run:
            recorded_run.record_operation(build_operation_event("down"))
            summarize_past_run(recorded_run)  # so that listing the run later does not parse its events
