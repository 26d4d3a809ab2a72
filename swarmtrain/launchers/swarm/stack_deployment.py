"""Deploy a stack under the run's lock: update existing objects, or wait for the end of their removal; roll back a failed first deploy."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmtrain.errors import EngineError, ResourcesReserved, StackError, SwarmtrainError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine, is_not_found_error
from swarmtrain.launchers.swarm import cluster_state, teardown
from swarmtrain.launchers.swarm.convergence import NO_TOLERANCE, StartupTolerance, list_task_ids, wait_until_services_running
from swarmtrain.launchers.swarm.reconcile import ObjectKind, ReconcileStep, StepVerb
from swarmtrain.launchers.swarm.resources.reservation import ResourceRequest, reserve_resources
from swarmtrain.launchers.swarm.run_lock import RunLock
from swarmtrain.launchers.swarm.step_executor import apply_steps
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts

# A network that is being removed is still listed for a moment after its last task, and services cannot be created with it.
_MAX_APPLY_ATTEMPTS = 10
_RETRY_SECONDS = 0.5


def deploy_stack(
    engine: DockerEngine,
    request: ResourceRequest,
    plan_steps: Callable[[], list[ReconcileStep]],
    report_progress: ProgressReporter,
    timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS,
    *,
    tolerance: StartupTolerance = NO_TOLERANCE,
    complete_submission: Callable[[], None] | None = None,
) -> None:
    """Apply the steps that `plan_steps` returns under the run's lock, and wait until the stack runs. Raises SwarmtrainError.

    `tolerance`: the nodes without which the stack also counts as running. `complete_submission`: what to do after the steps, under the
    lock, instead of waiting for containers, because a scheduler starts them.

    If resources of `request` are not free, ResourcesReserved is raised, and nothing is changed. The lock is held during changes, and
    preemptible during waits for containers: if another command takes the lock then, this deploy makes no more changes.
    """
    deployment = _StackDeployment(engine, request, plan_steps, report_progress, timeouts, tolerance=tolerance)
    with deployment.lock.hold_lock(report_progress):
        deployment.deploy_stack(complete_submission)


class _StackDeployment:
    def __init__(
        self,
        engine: DockerEngine,
        request: ResourceRequest,
        plan_steps: Callable[[], list[ReconcileStep]],
        report_progress: ProgressReporter,
        timeouts: SwarmTimeouts,
        *,
        tolerance: StartupTolerance,
    ) -> None:
        self._engine, self._request, self._plan_steps = engine, request, plan_steps
        self._report_progress, self._timeouts, self._tolerance = report_progress, timeouts, tolerance
        self._stack = request.run
        self.lock = RunLock(engine, request.run, "is deploying it", timeouts)
        self._created: set[str] = set()

    def deploy_stack(self, complete_submission: Callable[[], None] | None) -> None:
        """Deploy the stack, with the lock held."""
        is_first_deploy = self._wait_for_earlier_teardown()
        try:
            if complete_submission:
                self._submit_stack(complete_submission)
            else:
                self._apply_steps_and_wait_for_services()
        except ResourcesReserved:  # nothing was created
            raise
        except BaseException:
            if is_first_deploy:
                self._roll_back_deploy()
            raise

    def _wait_for_earlier_teardown(self) -> bool:
        """Wait until the removal of an earlier stack of this name is complete. Return whether this is a first deploy."""
        if cluster_state.list_services(self._engine, self._stack):
            return False
        if cluster_state.list_tasks(self._engine, self._stack):
            self.lock.allow_preemption()
            teardown.wait_until_tasks_cleared(self._engine, self._stack, self._report_progress)
            if not self.lock.reacquire_lock():
                raise self.lock.build_preemption_error()
        return True

    def _submit_stack(self, complete_submission: Callable[[], None]) -> None:
        applied = self._apply_steps()
        if not applied:
            self._report_progress(f"{self._stack} is up to date: nothing to do")
        self.lock.check_lock_held()
        complete_submission()
        removed_services = [step.service for step in applied if step.verb is StepVerb.remove and step.service]
        self.lock.allow_preemption()
        teardown.wait_until_services_stopped(self._engine, self._stack, removed_services, self._report_progress)

    def _apply_steps_and_wait_for_services(self) -> None:
        old_task_ids = list_task_ids(self._engine, self._stack)
        if self._starts_containers_with_resources():
            with reserve_resources(self._engine, self._request, self._report_progress, self._timeouts) as check_reservation:
                applied = self._apply_steps(check_reservation)
        else:
            applied = self._apply_steps()
        if not applied:
            self._report_progress(f"{self._stack} is up to date: nothing to do")
        self.lock.allow_preemption()
        restarted_service_ids = frozenset(step.id for step in applied if step.restarts)
        wait_until_services_running(
            self._engine,
            self._stack,
            old_task_ids,
            restarted_service_ids,
            report_progress=self._report_progress,
            check_ownership=self._check_stack_ownership,
            timeouts=self._timeouts,
            tolerance=self._tolerance,
        )
        removed_services = [step.service for step in applied if step.verb is StepVerb.remove and step.service]
        teardown.wait_until_services_stopped(self._engine, self._stack, removed_services, self._report_progress)

    def _starts_containers_with_resources(self) -> bool:
        """Return whether resources must be free. An unchanged finished run, for example, starts no container."""
        return bool(self._request.amounts) and any(
            step.kind is ObjectKind.service and step.verb is not StepVerb.remove for step in self._plan_steps()
        )

    def _apply_steps(self, check_reservation: Callable[[], None] = lambda: None) -> list[ReconcileStep]:
        """Apply the steps, and retry if an object that they depend on disappears meanwhile. Return the applied steps."""

        def check_locks() -> None:
            self.lock.check_lock_held()
            check_reservation()

        applied: list[ReconcileStep] = []
        for attempts_left in reversed(range(_MAX_APPLY_ATTEMPTS)):
            steps = self._plan_steps()
            applied += steps
            try:
                apply_steps(
                    self._engine,
                    self._stack,
                    steps,
                    created_names=self._created,
                    report_progress=self._report_progress,
                    check_lock=check_locks,
                )
                break
            except EngineError as error:
                if not is_not_found_error(error) or not attempts_left:
                    raise
                self._report_progress(f"{error.message}: retrying")
            time.sleep(_RETRY_SECONDS)
        return applied

    def _check_stack_ownership(self) -> None:
        """Check that no other command has changed the stack or taken it down. Raises StackError if one has."""
        if not self.lock.is_held_by_this_command():
            raise self.lock.build_preemption_error()
        if not cluster_state.list_services(self._engine, self._stack):
            raise StackError("was removed during this deploy", place=f"run {self._stack}", hint="deploy again")

    def _roll_back_deploy(self) -> None:
        try:
            if not self.lock.reacquire_lock():
                self._report_progress("failed or interrupted: another command has changed the run since, so nothing is removed")
                return
            self._report_progress("failed or interrupted: removing the created objects")
            teardown.roll_back_deploy(self._engine, self._stack, self._created, self._report_progress, self.lock.check_lock_held)
        except SwarmtrainError as error:
            self._report_progress(f"the created objects could not be removed: {error}; remove them with: swarmtrain down {self._stack}")
