"""The scheduler of the queue: read the state, decide, make the changes, and sleep until something happens.

Each change is written to the run's entry first, and then applied to its services. A scheduler that finds an entry and services that differ
applies the entry again. So it may be killed at any moment, and another one completes what it has begun. Every write names the version of
the service that was read, and every command that changes a run changes its coordinator's service: if the run has changed meanwhile,
nothing is written, and the next round decides again.

A scheduler only acts while it holds the scheduler's lock in the swarm. It admits, changes and stops a run only while no command holds the
lock of the run; the reason why a run waits is written without that lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from swarmtrain.config.schema.queue_policy import IdlePolicy
from swarmtrain.errors import EngineError, PlanError, StackError, SwarmtrainError
from swarmtrain.images.pinning import PinnedImage
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine, is_not_found_error, is_outdated_version_error
from swarmtrain.launchers.swarm import deployed_run
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.launchers.swarm.queue.machine_settings import copy_machine_settings
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry
from swarmtrain.launchers.swarm.run_lock import RunLock, UnchangedLocks
from swarmtrain.launchers.swarm.service_specs import ApiSpec, build_stack_specs
from swarmtrain.launchers.swarm.step_executor import run_in_parallel
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts
from swarmtrain.planning.placement import Placement
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.protocol import LABEL_NOTIFY, RENDEZVOUS_SERVICE, Event
from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.admission import decide
from swarmtrain.queueing.decisions.queue_model import ChangeKind, QueueChange, QueuedRun
from swarmtrain.queueing.queue_state import QueueMember, QueueReader, QueueState, find_machine
from swarmtrain.queueing.run_failures import EndedRunMonitor, count_lost_steps, describe_start_failure, read_last_events
from swarmtrain.queueing.run_limits import IdleGpuMonitor, compute_seconds_until_limit, find_limit_change
from swarmtrain.render.stack_document import render_stack

# Seconds until the next round: while containers stop or start, while runs wait, and if nothing is expected.
_BUSY_SECONDS, _WAITING_SECONDS, _IDLE_SECONDS = 1.0, 5.0, 30.0
_RETRY_SECONDS = 5.0
_MIN_INTERVAL_SECONDS = 0.2


class LeadershipLost(Exception):
    """Raised if this process is no longer the only scheduler. It must not change anything any more."""


class _ChangedMeanwhile(Exception):
    """Raised if a run has changed since it was read, so that the decision about it may be wrong."""


@dataclass(frozen=True)
class _PlannedChange:
    """A decision, with the entry that the run gets."""

    member: QueueMember
    entry: QueueEntry
    cause: str


class Scheduler:
    """Admits, shrinks, grows and stops the runs in the queue of one swarm. One round at a time."""

    def __init__(
        self,
        engine: DockerEngine,
        report_progress: ProgressReporter,
        timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS,
        *,
        check_leader: Callable[[], None] = lambda: None,
        get_time: Callable[[], float] = time.time,
        read_events: Callable[[DockerEngine, QueueMember], Sequence[Event]] = read_last_events,
    ) -> None:
        """`check_leader` is called before each change, and raises if this process is no longer the only scheduler."""
        self._engine, self._report_progress, self._timeouts = engine, report_progress, timeouts
        self._check_leader, self._get_time = check_leader, get_time
        self._reader = QueueReader(engine)
        self._unchanged_locks = UnchangedLocks()
        self._read_events = partial(read_events, engine)
        self._idle_gpus = IdleGpuMonitor(self._read_events)
        self._ended_runs = EndedRunMonitor()

    def run_forever(self, wake: threading.Event) -> None:
        """Make rounds until the process ends. `wake` starts the next round at once. Raises LeadershipLost."""
        while True:
            try:
                seconds = self.run_round()
            except SwarmtrainError as error:  # the manager does not answer, or the policy is one of a later version
                self._report_progress(f"{error}; trying again in {_RETRY_SECONDS:.0f} s")
                seconds = _RETRY_SECONDS
            time.sleep(_MIN_INTERVAL_SECONDS)
            wake.wait(seconds)
            wake.clear()

    def run_round(self) -> float:
        """Make one round, and return in how many seconds the next one is due. Raises EngineError, SwarmtrainError."""
        now = self._get_time()
        state = self._reader.read_state(now)
        is_changed = False
        for member in state.members.values():
            try:
                is_changed |= self._converge_member(state, member) or self._stop_stray_nodes(member, now)
            except (PlanError, StackError) as error:  # such as a machine that has left the swarm, or a config that cannot be read
                self._report_progress(f"{member.run}: {error}")
        if is_changed:
            return 0.0  # what has been read is out of date
        for member in state.members.values():
            new_entry = self._find_entry_change(member, state.policy.idle, now)
            if new_entry is not None:
                is_changed |= self._change_run(state, member, new_entry)
        if is_changed:
            return 0.0
        planned_changes, reasons = self._plan_changes(state, now)
        for planned in planned_changes:
            is_changed |= self._change_run(state, planned.member, planned.entry, planned.cause)
        if not is_changed:
            self._write_reasons(state, reasons)
        return _BUSY_SECONDS if is_changed else _find_delay(state, now)

    def _find_entry_change(self, member: QueueMember, idle_policy: IdlePolicy | None, now: float) -> QueueEntry | None:
        """Return the new entry of a run that has stopped, has reached a limit, or cannot start; None if there is no such reason."""
        if member.entry.is_saving and member.entry.state is not EntryState.admitted and not member.has_running_nodes:
            return replace(member.entry, is_saving=False, lost_steps=count_lost_steps(self._read_events(member)))
        if member.entry.state is not EntryState.admitted or member.has_ended:
            return None
        if failure := describe_start_failure(self._engine, member, now):
            return member.entry.stop_run(EntryState.stopped, now, failure)
        change = find_limit_change(member, now)
        return self._idle_gpus.find_change(member, idle_policy, now) if change is None and idle_policy else change

    def _plan_changes(self, state: QueueState, now: float) -> tuple[list[_PlannedChange], dict[str, str]]:
        """Return the changes to make, and why each other run waits. A run that no plan fits waits, and does not block the others."""
        snapshot = state.snapshot
        failures: dict[str, str] = {}
        while True:
            decision = decide(snapshot, state.list_ends())
            planned, failed = [], {}
            for change in decision.changes:
                member = state.members[change.run]
                try:
                    entry = self._build_new_entry(state, member, change, now)
                    planned.append(_PlannedChange(member, entry, f"{change.kind} {change.run}: {change.cause}"))
                except (PlanError, StackError) as error:
                    failed[change.run] = f"cannot start: {error}"
            if not failed:
                return planned, {**decision.reasons, **failures}
            failures |= failed
            snapshot = replace(snapshot, runs=tuple(_exclude_run(run) if run.run in failed else run for run in snapshot.runs))

    def _build_new_entry(self, state: QueueState, member: QueueMember, change: QueueChange, now: float) -> QueueEntry:
        """Return the entry of a run after `change`. Raises PlanError if the run cannot train on any such number of machines."""
        if change.kind is ChangeKind.preempt:
            return member.entry.stop_run(EntryState.waiting, now, f"preempted: {change.cause}")
        kept = {node: machine for node, machine in member.entry.machines.items() if machine in change.machines}
        machines = sorted(change.machines, key=lambda machine: machine not in kept.values())
        min_count = max(len(kept), min(member.config.runner.node_range[0], len(machines)) if member.config else 1)
        while True:
            try:
                plan = self._plan_run(state, member, replace(member.entry, machines=kept), frozenset(machines))
                break
            except PlanError:  # the parallel sizes of some runs do not fit every number of nodes
                if len(machines) <= min_count:
                    raise
                machines.pop()
        found = {node.name: find_machine(state.inventory, node) for node in plan.nodes}
        ids = {name: machine.id for name, machine in found.items() if machine}
        return member.entry.change_state(EntryState.admitted, now, machines=ids)

    def _change_run(self, state: QueueState, member: QueueMember, entry: QueueEntry, cause: str = "") -> bool:
        """Write the new entry of a run, and apply it to its services. Return whether it did."""

        def change() -> None:
            coordinator = self._write_coordinator(member, entry)
            services = tuple(coordinator if service.id == coordinator.id else service for service in member.services)
            self._apply_entry(state, replace(member, services=services, coordinator=coordinator, entry=entry))

        return self._call_with_lock(member.run, cause or f"{entry.state} {member.run}: {entry.reason}", change)

    def _converge_member(self, state: QueueState, member: QueueMember) -> bool:
        """Apply the entry of a run to its services, if they differ because a scheduler or a deploy was killed. Return whether it did."""
        if member.problem or not self._list_differing_nodes(state, member):
            return False
        return self._call_with_lock(
            member.run, f"completing an interrupted change of {member.run}", lambda: self._apply_entry(state, member)
        )

    def _stop_stray_nodes(self, member: QueueMember, now: float) -> bool:
        """Stop the nodes that Swarm has started again after the end of their run. Return whether it did."""
        strays = self._ended_runs.list_stray_nodes(member, now)
        if not strays:
            return False
        names = ", ".join(service.get_short_name(member.run) for service in strays)
        return self._call_with_lock(
            member.run, f"stopping {names} of {member.run}, which has ended", lambda: run_in_parallel(self._stop_node, strays)
        )

    def _call_with_lock(self, run: str, description: str, change: Callable[[], None]) -> bool:
        """Call `change` while holding the lock of a run. Return False if the run has changed, or a command is changing it."""
        try:
            with RunLock(self._engine, run, "schedules it", self._timeouts).hold_lock_if_free(self._unchanged_locks) as is_held:
                if not is_held:
                    return False
                self._report_progress(description)
                change()
        except _ChangedMeanwhile:
            return False
        return True

    def _apply_entry(self, state: QueueState, member: QueueMember) -> None:
        """Make the services of the nodes what the entry says: on which machine each runs, and whether it does."""
        differing = self._list_differing_nodes(state, member)
        specs: Mapping[str, ApiSpec] = {}
        if any(service.get_short_name(member.run) in member.entry.machines for service in differing):
            specs = self._render_nodes(state, member)

        def update_node(service: Service) -> None:
            node = service.get_short_name(member.run)
            if node in specs and node in member.entry.machines:
                self._update_service(service, _restart(copy_machine_settings(service.spec, specs[node])))
            else:
                self._stop_node(service)

        run_in_parallel(update_node, differing)  # nodes that stop together save one checkpoint

    def _stop_node(self, service: Service) -> None:
        self._update_service(service, {**service.spec, "Mode": {"Replicated": {"Replicas": 0}}})

    def _list_differing_nodes(self, state: QueueState, member: QueueMember) -> list[Service]:
        """Return the services of the nodes that are not what the entry says."""
        admitted = member.entry.machines if member.entry.state is EntryState.admitted else {}
        hosts = {machine.id: machine.host for machine in state.inventory.machines}
        differing = []
        for service in member.nodes:
            machine = admitted.get(service.get_short_name(member.run))
            if machine is None:
                is_right = not service.replicas
            elif member.has_coordinator_exited:
                is_right = True  # it has exited, or must be stopped: see EndedRunMonitor
            else:
                is_right = bool(service.replicas) and service.pinned_machine in (machine, hosts.get(machine))
            if not is_right:
                differing.append(service)
        return differing

    def _write_coordinator(self, member: QueueMember, entry: QueueEntry) -> Service:
        """Store the entry, and return the service as updated.

        If the run is admitted and its coordinator does not run, it is started. If the run has saved because the scheduler has stopped it, a
        coordinator that sends notifications is restarted: it reports the stop.
        """
        service = member.coordinator
        spec = {**service.spec, "Labels": {**service.labels, **entry.to_labels()}}
        has_saved = member.entry.is_saving and not entry.is_saving
        is_notified = has_saved and bool(entry.stop) and bool(service.replicas) and LABEL_NOTIFY in spec["Labels"]
        if is_notified or (entry.state is EntryState.admitted and (not service.replicas or member.has_ended)):
            spec = _restart(spec)
        self._update_service(service, spec)
        return replace(service, spec=spec)

    def _write_reasons(self, state: QueueState, reasons: Mapping[str, str]) -> None:
        """Store why runs wait, where that has changed."""
        for run, reason in reasons.items():
            member = state.members[run]
            if member.entry.reason == replace(member.entry, reason=reason).shortened_reason:
                continue
            try:
                self._write_coordinator(member, replace(member.entry, reason=reason))
            except _ChangedMeanwhile:
                continue

    def _update_service(self, service: Service, spec: ApiSpec) -> None:
        """Update a service if it is as it was read. Raises _ChangedMeanwhile, LeadershipLost, EngineError."""
        try:
            self._check_leader()
        except StackError as error:
            raise LeadershipLost(str(error)) from None
        try:
            # The nodes keep pulling with the login of the person who has submitted the run: Swarm stores it with the service.
            self._engine.post(f"/services/{service.id}/update", spec, {"version": str(service.version), "registryAuthFrom": "spec"})
        except EngineError as error:
            if is_outdated_version_error(error) or is_not_found_error(error):
                raise _ChangedMeanwhile from None
            raise

    def _plan_run(self, state: QueueState, member: QueueMember, entry: QueueEntry, machines: frozenset[str]) -> Plan:
        """Return the plan of a run on exactly `machines`; nodes keep their machines in `entry`. Raises PlanError."""
        config, cargo = deployed_run.read_sent_deployment(self._engine, member.services, member.run)
        placement = Placement(dict(entry.machines), member.coordinator.pinned_machine)
        return build_plan(config, state.inventory, cargo, run=member.run, node_count=len(machines), placement=placement, machines=machines)

    def _render_nodes(self, state: QueueState, member: QueueMember) -> dict[str, ApiSpec]:
        """Return the specs of the nodes on the machines in the entry, by node name."""
        plan = self._plan_run(state, member, member.entry, frozenset(member.entry.machines.values()))
        stack = render_stack(plan)
        images = {service["image"]: _find_pinned_image(member) for service in stack.document["services"].values()}
        specs = build_stack_specs(stack, images)
        prefix = f"{member.run}_"
        return {name.removeprefix(prefix): spec for name, spec in specs.services.items() if name != f"{prefix}{RENDEZVOUS_SERVICE}"}


def _find_delay(state: QueueState, now: float) -> float:
    """Return in how many seconds something may happen that the swarm does not report as an event: containers end, or a limit is reached."""
    runs = [run for run in state.snapshot.runs if not run.is_finished]
    delay = _IDLE_SECONDS
    if any(run.leaving for run in runs):
        delay = _BUSY_SECONDS
    elif any(run.state is EntryState.waiting for run in runs):
        delay = _WAITING_SECONDS
    admitted = [state.members[run.run] for run in runs if run.state is EntryState.admitted]
    # While a command holds the lock of a run that has reached its limit, nothing can be done about it.
    return max(_BUSY_SECONDS, min([delay, *(compute_seconds_until_limit(member, now) for member in admitted)]))


def _exclude_run(run: QueuedRun) -> QueuedRun:
    """Return `run` as one that needs no plan: it gets no machines, not even for those that it has lost, and gives up all or none."""
    if run.state is EntryState.admitted:
        return replace(run, nodes=0, min_nodes=len(run.allocated))
    return replace(run, state=EntryState.stopped)


def _restart(spec: ApiSpec) -> ApiSpec:
    """Return `spec` with one replica, and with another ForceUpdate count: earlier tasks then do not count as those of this start."""
    task = {**spec["TaskTemplate"], "ForceUpdate": int(spec["TaskTemplate"].get("ForceUpdate", 0)) + 1}
    return {**spec, "TaskTemplate": task, "Mode": {"Replicated": {"Replicas": 1}}}


def _find_pinned_image(member: QueueMember) -> PinnedImage:
    """Return the image with which the run was submitted: the scheduler needs no access to its registry."""
    task = member.nodes[0].spec["TaskTemplate"]
    platforms = (task.get("Placement") or {}).get("Platforms") or []
    return PinnedImage(str(task["ContainerSpec"]["Image"]), tuple((item.get("Architecture", ""), item.get("OS", "")) for item in platforms))
