"""State machine of the coordinator: decides which world is current, and the outcome of the run.

A pure state machine: `publish_event` publishes its events, `clock` returns the time (seconds, monotonic). The rules:
- A round, in which one world follows another, is used until an agent has ended; N nodes that report its end start one new round.
- A failed world consumes one of `max_restarts`, no matter how many of its ranks fail. A step higher than any before resets the count of
  `max_restarts`, but not that of `max_restarts_per_hour`. When no restart is left, the run has failed, and the first failure of its last
  world is the reason. The same exception at the same step twice in a row is a bug and ends the run, whatever the budget.
- A run is done when the trainer reports it, or, with a script that reports nothing, when all nodes of a world have exited with exit code 0.
- After one node has finished, the others cannot form that world again: if one of them fails, the run has failed.
- An outcome is final: a coordinator that replaces one that was lost adopts the outcome that a node knows.

membership.py tracks which nodes are present, world_assembly.py assigns them to worlds, event_log.py limits the rate of log lines,
world_tracker.py tracks worlds, their failures and the ranks that wait for their process group, restart_budget.py limits failures, and
node_quarantine.py excludes flaky nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from swarmtrain.entrypoint.coordinator.event_log import EventLogWriter
from swarmtrain.entrypoint.coordinator.membership import Membership
from swarmtrain.entrypoint.coordinator.node_quarantine import NodeQuarantine, is_machine_failure
from swarmtrain.entrypoint.coordinator.restart_budget import RestartBudget
from swarmtrain.entrypoint.coordinator.world_assembly import WorldAssembly
from swarmtrain.entrypoint.coordinator.world_tracker import ConnectingRanks, FailureCause, ReportedFailures, WorldTracker
from swarmtrain.failure_text import describe_error
from swarmtrain.protocol import (
    EVENT_CHECKPOINT,
    EVENT_COORDINATOR_STARTED,
    EVENT_FAILURE,
    EVENT_GPU_FAULT,
    EVENT_NODE_JOINED,
    EVENT_NODE_LEFT,
    EVENT_NODE_QUARANTINED,
    EVENT_NODE_RELEASED,
    EVENT_OPERATION,
    EVENT_OUTCOME,
    EVENT_PROGRESS,
    EVENT_SCRIPT_RETURNED,
    EVENT_TRAINING_FINISHED,
    EVENT_USAGE,
    EVENT_WORLD_FORMED,
    EXIT_PLANNED,
    PERMANENT_BEFORE_FIRST_STEP,
    PROTOCOL_VERSION,
    ConnectingRank,
    ConnectingWorld,
    Event,
    EventResponse,
    RunOutcome,
    SupervisorResponse,
    WorldAssignment,
    WorldRequest,
)

LINGER_SECONDS = 2.0
"""Minimum seconds that the coordinator keeps serving after the run has an outcome."""
STABLE_WORLD_SECONDS = 300.0
"""Seconds that a world must run to count as progress, for scripts that report no steps."""
COLLATERAL_GRACE_SECONDS = 3.0
"""Seconds to wait for the root cause if only collateral failures were reported so far."""
ROOT_CAUSE_SECONDS = 1.0
"""Seconds for which the ranks of a world run on after a collateral failure: the rank that caused it may not have reported it yet."""
SILENT_SECONDS = 2.5
"""Seconds without a heartbeat after which a node counts as the reason for collateral failures. Less than COLLATERAL_GRACE_SECONDS."""

_RESERVED_KINDS = {EVENT_OPERATION, EVENT_COORDINATOR_STARTED, EVENT_NODE_LEFT, EVENT_NODE_QUARANTINED, EVENT_NODE_RELEASED, EVENT_OUTCOME}


class Coordinator:
    """State machine of the coordinator of one run. `boot_id` distinguishes its rounds from those of an earlier coordinator process.

    `run_id`: id of the run (swarmtrain.protocol.run_identity), for the ranks; empty if it is unknown. `has_notified`: returns whether all
    notifications are delivered or given up.
    """

    def __init__(
        self,
        *,
        run: str,
        max_restarts: int,
        max_restarts_per_hour: int,
        min_nodes: int,
        boot_id: str,
        run_id: str = "",
        clock: Callable[[], float],
        publish_event: Callable[[Event], None],
        has_notified: Callable[[], bool] = lambda: True,
    ) -> None:
        self._budget = RestartBudget(max_restarts, max_restarts_per_hour, clock)
        self._quarantine = NodeQuarantine(min_nodes, clock)
        self._boot_id, self._run_id = boot_id, run_id
        self._clock, self._has_notified = clock, has_notified
        self._event_log = EventLogWriter(publish_event, clock)
        self._membership = Membership(clock)
        self._assembly = WorldAssembly(clock)
        self._worlds = WorldTracker()
        self._connecting_ranks = ConnectingRanks(clock)
        self._reported_failures = ReportedFailures()
        self._reported_gpu_faults: set[tuple[str, str]] = set()
        self._round_number = 1
        self._membership_changing = True
        self._charged_worlds: set[str] = set()
        self._failure_cause: FailureCause | None = None
        self._give_up_at: float | None = None
        self._best_step = -1
        self._outcome: RunOutcome | None = None
        self._outcome_at = 0.0
        self._event_log.write_event(Event(EVENT_COORDINATOR_STARTED, {"run": run, "run_id": run_id, "protocol": PROTOCOL_VERSION}))

    @property
    def round(self) -> str:
        return f"{self._boot_id}-{self._round_number}"

    @property
    def supervisor_response(self) -> SupervisorResponse:
        return SupervisorResponse(self.round, self._outcome, self._run_id)

    @property
    def is_over(self) -> bool:
        """Whether the run has had an outcome for some seconds, and its notifications are delivered or given up."""
        return self._outcome is not None and self._clock() - self._outcome_at >= LINGER_SECONDS and self._has_notified()

    @property
    def is_finished(self) -> bool:
        """Whether the run is over, and every node that is not lost knows it."""
        return self.is_over and self._membership.has_no_active_nodes

    def register_node(self, node: str) -> SupervisorResponse:
        """Register a start of a node's supervisor, the first start or a restart, and return the response."""
        if node not in self._membership:
            self._membership_changing = True
        elif node in self._worlds.unfinished_nodes:
            self._fail_run_with_incomplete_world(f"{node} was lost")
        if self._membership.register_node(node) and self._worlds.newest:
            self._record_machine_failure(self._worlds.newest.key, node)
        return self.supervisor_response

    def record_heartbeat(self, node: str) -> SupervisorResponse:
        """Record a heartbeat of a node's supervisor, and return the response."""
        self._membership.record_heartbeat(node)
        return self.supervisor_response

    def close_round(self, node: str, round: str) -> SupervisorResponse:
        """Record that a node, without an agent, is ready for the round after `round` ("" before its first). Return the response.

        If the response names the same round again, the other nodes are finishing, and the node must not start an agent.
        """
        self._membership.record_heartbeat(node)
        if round == self.round and not self._outcome:
            if node in self._worlds.unfinished_nodes:
                self._fail_run_with_incomplete_world(f"{node} ended")
            elif not self._worlds.has_finished_node:
                self._round_number += 1
            elif self._worlds.newest and self._worlds.newest.is_finished and node in self._worlds.newest.members:
                # its agent was lost when all ranks had returned: nothing is left to run
                self._set_done_outcome(self._worlds.newest.node_count)
        if round == self.round or self._outcome:
            return self.supervisor_response
        return replace(self.supervisor_response, wait=node in self._quarantine.quarantined_nodes)

    @property
    def world_state(self) -> tuple[object, ...]:
        """What the responses to agents that wait for a world, or for its end, depend on."""
        return self._assembly.state, self.round, self._outcome

    def assign_world(self, request: WorldRequest) -> WorldAssignment:
        """Return the ranks of a node in the next world; an assignment without a world if it has not formed yet."""
        if request.round != self.round or self._outcome:
            return WorldAssignment(is_round_over=True)
        if self._assembly.add_request(request):
            self._update_assembly()
        return self._assembly.get_assignment(request)

    def is_world_over(self, world: str) -> bool:
        """Return whether the ranks of `world` must end. Supervisors end the agents of a round that is over."""
        return self._has_run_failed or self._assembly.is_over(world)

    def end_world(self, world: str) -> None:
        """End `world`, because ranks have left it after a stop request."""
        self._assembly.end_world(world)

    def _update_assembly(self) -> None:
        self._assembly.update(
            self._membership.responsive_nodes,
            self._quarantine.quarantined_nodes,
            can_interrupt=not self._worlds.has_finished_node,
        )

    def record_node_exit(self, node: str, exit_code: int) -> SupervisorResponse:
        """Record a node's exit and return the response. A node that has exited with an outcome repeats the call until the run is over.

        `exit_code`: 0 for success, EXIT_PLANNED if a stop was requested; any other value is a failure.
        """
        if self._membership.record_node_exit(node, exit_code):
            self._handle_node_exit(node, exit_code)
        is_waiting = self._outcome is not None and exit_code != EXIT_PLANNED and not self.is_over
        self._membership.set_waiting(node, is_waiting=is_waiting)
        return replace(self.supervisor_response, is_over=self.is_over)

    def _handle_node_exit(self, node: str, exit_code: int) -> None:
        self._assembly.forget_node(node, has_finished=exit_code == 0)
        self._event_log.write_event(Event(EVENT_NODE_LEFT, {"node": node, "exit_code": exit_code}))
        if exit_code == EXIT_PLANNED:
            self._membership_changing = True
            self._quarantine.clear_failure_record(node)
            self._reported_gpu_faults = {fault for fault in self._reported_gpu_faults if fault[0] != node}
        if exit_code == 0 and (world := self._worlds.newest):
            world.finished_nodes.add(node)
            finished_nodes = [member for member in world.members if self._membership.has_node_finished(member)]
            if len(finished_nodes) >= world.node_count:
                self._set_done_outcome(len(finished_nodes))
        elif node in self._worlds.unfinished_nodes:
            self._fail_run_with_incomplete_world(f"{node} exited with exit code {exit_code}")

    def record_connecting_rank(self, rank: ConnectingRank) -> ConnectingWorld:
        """Record whether a rank waits in init_process_group, and return the state of its world."""
        return self._connecting_ranks.record_rank(rank)

    def adopt_outcome(self, outcome: RunOutcome) -> None:
        """Adopt the outcome that an earlier coordinator, which was lost, sent to a node; the nodes that know it train no further."""
        self._set_outcome(outcome)

    def handle_event(self, event: Event) -> EventResponse:
        """Handle an event from a node or a rank, and return the response.

        Raises ValueError for an event kind that only the coordinator may write.
        """
        if event.kind in _RESERVED_KINDS:
            raise ValueError(f"an event of kind `{event.kind}` may only be written by the coordinator")
        is_known = False
        if event.kind == EVENT_WORLD_FORMED:
            self._record_world_join(event)
        elif event.kind == EVENT_FAILURE:
            is_known = self._record_failure(event)
        elif event.kind == EVENT_GPU_FAULT:
            self._record_gpu_fault(event)
        elif event.kind == EVENT_USAGE:
            self._event_log.write_resource_usage(event.data, self._membership)
        elif event.kind == EVENT_PROGRESS:
            self._record_progress(event)
            self._event_log.write_progress(event)
        elif event.kind == EVENT_SCRIPT_RETURNED:
            self._record_returned_rank(event)
        elif event.kind == EVENT_NODE_JOINED:
            self._assembly.expect_node(str(event.data["node"]))
            self._worlds.record_address(str(event.data["node"]), str(event.data.get("address")))
            self._event_log.write_event(event)
        else:
            self._event_log.write_event(event)
            self._record_progress(event)
        return EventResponse(is_known, run_failed=self._has_run_failed)

    def process_timeouts(self) -> None:
        """Process timeouts: declare silent nodes lost, and fail the run once the wait for a root cause is over."""
        for name in self._membership.remove_lost_nodes():
            self._assembly.forget_node(name, has_finished=False)
            self._event_log.write_event(Event(EVENT_NODE_LEFT, {"node": name, "exit_code": None}))
            if name in self._worlds.unfinished_nodes:
                self._fail_run_with_incomplete_world(f"{name} was lost")
        for event in [] if self._outcome else self._quarantine.release_nodes(self._membership.members):
            self._membership_changing = True
            self._event_log.write_event(event)
        if not (self._outcome or self._worlds.has_finished_node):
            for event in self._quarantine.quarantine_faulty_nodes(self._membership.members):
                self._apply_quarantine(event)
        if connecting_event := self._connecting_ranks.take_event():
            self._event_log.write_event(connecting_event)
        self._event_log.write_pending_progress()
        if self._give_up_at is not None and self._clock() >= self._give_up_at:
            self._fail_run()
        self._update_assembly()

    def _record_returned_rank(self, event: Event) -> None:
        node, world = str(event.data["node"]), self._worlds.newest
        if world and event.data["world"] == world.key and world.record_returned_rank(node, int(event.data["rank"])):
            self._event_log.write_event(Event(EVENT_SCRIPT_RETURNED, {"node": node, "world": world.key}))

    def _record_progress(self, event: Event) -> None:
        if event.kind == EVENT_TRAINING_FINISHED:
            self._set_outcome(RunOutcome("done", f"the last step, {event.data.get('step')}, is done", 0))
        elif event.kind in {EVENT_PROGRESS, EVENT_CHECKPOINT}:
            step = event.data.get("step")
            if isinstance(step, int) and step > self._best_step:
                self._best_step = step
                self._budget.reset_consecutive_failures()
                self._give_up_at = None

    def _record_world_join(self, event: Event) -> None:
        if world := self._worlds.add_node(event.data, self._clock()):
            self._membership_changing = False
            ranks = dict(sorted(world.ranks.items(), key=lambda item: item[1]))
            self._event_log.write_event(Event(EVENT_WORLD_FORMED, {**event.data, "ranks": ranks}))

    def _record_failure(self, event: Event) -> bool:
        """Record a failure event. Return whether the failure's reason was already reported."""
        cause = self._worlds.attribute_failure(event.data, self.round)
        self._assembly.end_world(cause.world, ROOT_CAUSE_SECONDS if cause.is_collateral else 0.0)
        is_known = self._reported_failures.record_failure_reason(cause)
        if self._reported_failures.record_failure_report(cause, event.data) and not self._has_run_failed:
            self._event_log.write_event(Event(EVENT_FAILURE, cause.data))
            self._fail_run_or_charge_restart(cause)
        return is_known

    def _fail_run_or_charge_restart(self, cause: FailureCause) -> None:
        permanent, world = cause.data.get("permanent"), self._worlds.newest
        if permanent is True or (permanent == PERMANENT_BEFORE_FIRST_STEP and self._best_step < 0):
            self._failure_cause = cause
            self._fail_run("retrying would not help")
        elif world and cause.world == world.key and world.finished_nodes - {cause.node}:
            self._failure_cause = cause
            self._fail_run_with_incomplete_world("")
        else:
            self._charge_restart_budget(cause)

    def _charge_restart_budget(self, cause: FailureCause) -> None:
        if cause.world not in self._charged_worlds:
            if cause.is_collateral and self._membership_changing:
                return  # peers failed because a node joined or left: not charged to the budget
            self._charged_worlds.add(cause.world)
            if self._is_stable_world(cause.world):
                self._budget.reset_consecutive_failures()
            self._budget.record_failure()
            self._set_failure_cause(cause)
        elif (
            self._failure_cause
            and self._failure_cause.world == cause.world
            and self._failure_cause.is_collateral
            and not cause.is_collateral
        ):
            self._set_failure_cause(cause)
        if self._budget.repeated_failure_reason:
            self._fail_run(self._budget.repeated_failure_reason)
        elif self._budget.exhaustion_reason and self._failure_cause:
            self._give_up_at = self._clock() + (COLLATERAL_GRACE_SECONDS if self._failure_cause.is_collateral else 0.0)
            self.process_timeouts()

    def _set_failure_cause(self, cause: FailureCause) -> None:
        self._failure_cause = cause
        self._budget.record_failure_cause(cause.world, cause.data)
        if is_machine_failure(cause.data):
            self._record_machine_failure(cause.world, cause.node)

    def _record_machine_failure(self, world: str, node: str) -> None:
        """Record that the machine of `node` caused the failure of `world`, and quarantine the node if it fails too often.

        The other nodes then start a new round without it.
        """
        if self._outcome or self._worlds.has_finished_node:
            return
        self._apply_quarantine(self._quarantine.record_machine_failure(world, node, self._membership.members))

    def _record_gpu_fault(self, event: Event) -> None:
        """Write a fault of a GPU to the log once, and quarantine its node if the GPU is faulty."""
        node, fault = str(event.data["node"]), str(event.data["message"])
        if (node, fault) in self._reported_gpu_faults:
            return
        self._reported_gpu_faults.add((node, fault))
        self._event_log.write_event(event)
        if event.data["is_hardware"] and not (self._outcome or self._worlds.has_finished_node):
            self._apply_quarantine(self._quarantine.record_gpu_fault(node, fault, self._membership.members))

    def _apply_quarantine(self, event: Event | None) -> None:
        """Write the event of a quarantine, or of a warning, and start a new round if a node is quarantined."""
        if event and event.kind == EVENT_NODE_QUARANTINED:
            self._round_number += 1
            self._membership_changing = True
            self._give_up_at = None
            self._budget.reset_consecutive_failures()  # failures caused by that node no longer count against the others
        if event:
            self._event_log.write_event(event)

    def _is_stable_world(self, world_key: str) -> bool:
        world = self._worlds.newest
        return (
            self._best_step < 0 and world is not None and world.key == world_key and self._clock() - world.formed_at >= STABLE_WORLD_SECONDS
        )

    def _fail_run_with_incomplete_world(self, incident: str) -> None:
        finished_node = min(self._worlds.newest.finished_nodes) if self._worlds.newest else ""
        reason = f"{finished_node} had already finished, so this world cannot form again"
        self._fail_run(f"{incident}; {reason}" if incident else reason, omit_cause=bool(incident))

    @property
    def _has_run_failed(self) -> bool:
        return self._outcome is not None and not self._outcome.is_success

    def _fail_run(self, reason: str | None = None, *, omit_cause: bool = False) -> None:
        cause, reason = self._failure_cause, reason or self._budget.exhaustion_reason or "given up"
        data = cause.data if cause else {}
        full_reason = f"{self._describe_cause(cause)}; {reason}" if cause and not omit_cause else reason
        self._set_outcome(RunOutcome("failed", full_reason, cause.exit_code if cause else 1, str(data.get("hint") or "")))

    def _describe_cause(self, cause: FailureCause) -> str:
        """Return the cause of the run's failure as text. The node that went silent comes before the ranks that lost it."""
        text = f"{cause.failed_node_and_rank}: {describe_error(cause.data)}"
        silent = self._membership.find_silent_nodes(SILENT_SECONDS) & (self._worlds.newest.members if self._worlds.newest else set())
        suspects = silent & {cause.data["peer"]} if "peer" in cause.data else silent
        if not cause.is_collateral or not suspects:
            return text
        return f"{', '.join(sorted(suspects))}: went silent without reporting a reason; {text}"

    def _set_done_outcome(self, node_count: int) -> None:
        self._set_outcome(RunOutcome("done", f"all {node_count} nodes have finished" if node_count > 1 else "its node has finished", 0))

    def _set_outcome(self, outcome: RunOutcome) -> None:
        self._give_up_at = None
        if self._outcome:
            return
        self._outcome, self._outcome_at = replace(outcome, round=outcome.round or self.round), self._clock()
        data = {key: value for key, value in asdict(self._outcome).items() if key != "hint" or value}
        self._event_log.write_event(Event(EVENT_OUTCOME, data))
