"""The Swarm launcher: deploys a plan as a stack, with one service for each node, on the swarm that DOCKER_HOST points to.

The launcher keeps all of its state in the swarm, so users can manage a run from any machine that reaches a manager. A stack that was
started with plain `docker stack deploy` is equivalent to one that this launcher started.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode, RunnerConfig
from swarmtrain.config.schema.runner_types import find_capabilities
from swarmtrain.errors import StackError
from swarmtrain.images import pin_image
from swarmtrain.images.swarm_nodes import build_engine_address, get_engine_node_id
from swarmtrain.launchers.base import ClusterReport, Finding, LogLine, NodeCommand, ProgressReporter, RunOverview, RunUpdate, TaskState
from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.container_logs import ContainerLogLine
from swarmtrain.launchers.common.docker_engine import DockerEngine, build_exec_argv
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.common.log_recorder import record_log_lines
from swarmtrain.launchers.common.stack_file import write_stack_file
from swarmtrain.launchers.swarm import cluster_state, code_placement, deployed_run, plan_checks, task_states, teardown
from swarmtrain.launchers.swarm.cluster_channels import add_cluster_channels
from swarmtrain.launchers.swarm.convergence import StartupTolerance
from swarmtrain.launchers.swarm.following.update_stream import LogScope, format_manager_name, watch_run
from swarmtrain.launchers.swarm.machines.machine_records import read_measurements, record_gpus, record_measurement
from swarmtrain.launchers.swarm.queue import submission
from swarmtrain.launchers.swarm.queue.queue_entry import find_queue_entry
from swarmtrain.launchers.swarm.reconcile import EndedRun, ReconcileStep, reconcile
from swarmtrain.launchers.swarm.resources import resource_accounting
from swarmtrain.launchers.swarm.resources.reservation import ResourceRequest
from swarmtrain.launchers.swarm.run_lock import RunLock
from swarmtrain.launchers.swarm.service_specs import StackSpecs, add_labels, build_stack_specs
from swarmtrain.launchers.swarm.stack_deployment import deploy_stack
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts
from swarmtrain.planning.inventory import Inventory
from swarmtrain.planning.placement import Placement
from swarmtrain.planning.plan import Plan
from swarmtrain.planning.step_estimates import ClusterMeasurement
from swarmtrain.protocol import EVENT_NOTE, EVENT_OUTCOME, RENDEZVOUS_SERVICE, Event, RunOutcome
from swarmtrain.protocol.run_identity import RunIdentity, create_run_identity
from swarmtrain.render.mounts import WORKSPACE
from swarmtrain.render.stack_document import Stack, render_stack


class SwarmLauncher:
    """Launcher for runs on a Docker Swarm. Implements swarmtrain.launchers.base.Launcher, which documents each method."""

    capabilities = find_capabilities("swarm")
    write_deployment_file = staticmethod(write_stack_file)

    def __init__(self, address: str | None = None, timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS) -> None:
        """Connect to the engine at `address`, by default the one that the docker CLI uses. Raises EngineError if no engine answers."""
        self._engine, self._timeouts = DockerEngine(address), timeouts
        self._deployed_at: dict[str, float] = {}

    @property
    def location(self) -> str:
        return f"the swarm at {self._engine.endpoint}"

    @property
    def engine(self) -> DockerEngine:
        """The engine of a manager to which the launcher is connected."""
        return self._engine

    def queues_run(self, plan: Plan) -> bool:
        """Return whether `plan` waits in the queue of a scheduler. The doctor's probes never do: they are refused if they do not fit."""
        return not plan.is_probe and submission.is_scheduler_installed(self._engine)

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        return cluster_state.read_inventory(self._engine)

    def check_plan(self, plan: Plan) -> list[Finding]:
        findings = plan_checks.collect_findings(self._engine, plan)
        if any(finding.fatal for finding in findings):
            return findings
        return [
            *findings,
            *plan_checks.collect_network_findings(self._build_stack_specs(plan), cluster_state.read_stack_state(self._engine, plan.run)),
        ]

    def inspect_cluster(self, plan: Plan | None) -> ClusterReport:
        from swarmtrain.launchers.swarm import checks  # only doctor needs them

        return checks.inspect_cluster(self._engine, plan)

    def record_probe(self, gpus_by_node_id: Mapping[str, Sequence[str]], measurement: ClusterMeasurement | None) -> None:
        record_gpus(self._engine, gpus_by_node_id)
        if measurement is not None:
            record_measurement(self._engine, measurement)

    def read_measurements(self) -> list[ClusterMeasurement]:
        return read_measurements(self._engine)

    def plan_changes(self, plan: Plan) -> list[ReconcileStep]:
        """str() formats each step. Raises ImageError, StackError, EngineError."""
        return self._plan_reconcile_steps(plan, self._build_stack_specs(plan), create_run_identity(), is_queued=self.queues_run(plan))

    def deploy_run(self, plan: Plan, report_progress: ProgressReporter) -> None:
        desired = self._pin_images(render_stack(self._place_code(plan, report_progress)))
        new_identity, self._deployed_at[plan.run] = create_run_identity(), time.time()
        is_queued = self.queues_run(plan)

        def plan_steps() -> list[ReconcileStep]:
            steps = self._plan_reconcile_steps(plan, desired, new_identity, is_queued=is_queued)
            if is_queued:
                submission.write_entry_first(self._engine, plan.run, steps)
            return steps

        deploy_stack(
            self._engine,
            ResourceRequest(plan.run) if is_queued else _build_resource_request(plan),
            plan_steps,
            report_progress,
            self._timeouts,
            tolerance=_build_startup_tolerance(plan),
            complete_submission=partial(submission.complete_entry, self._engine, plan.run, report_progress) if is_queued else None,
        )

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        services = cluster_state.list_run_services(self._engine, run)
        return deployed_run.read_deployment(self._engine, services, run)

    def read_identity(self, run: str) -> RunIdentity:
        return cluster_state.find_identity(cluster_state.list_run_services(self._engine, run), run)

    def read_placement(self, run: str) -> Placement:
        services = cluster_state.list_run_services(self._engine, run)
        pinned = {service.get_short_name(run): service.pinned_machine for service in services}
        coordinator = pinned.pop(RENDEZVOUS_SERVICE, "")
        entry = find_queue_entry(services, run)
        machines = pinned if entry is None else entry.machines  # the machines of nodes that wait mean nothing
        return Placement({node: machine for node, machine in machines.items() if machine}, coordinator)

    def list_runs(self) -> list[str]:
        return cluster_state.list_runs(self._engine)

    def read_overviews(self) -> list[RunOverview]:
        return task_states.read_overviews(self._engine)

    def list_terminating_runs(self) -> list[str]:
        return cluster_state.list_terminating_runs(self._engine)

    def list_tasks(self, run: str) -> list[TaskState]:
        services = cluster_state.list_run_services(self._engine, run)
        tasks, hosts = cluster_state.list_tasks(self._engine, run), cluster_state.read_host_names(self._engine)
        states = task_states.build_task_states(run, services, tasks, hosts, cluster_state.read_unavailable_hosts(self._engine, tasks))
        return [
            *task_states.list_stopping_nodes(tasks, services, hosts),
            *resource_accounting.add_reservations_to_states(self._engine, run, services, states),
        ]

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
        return self._read_events(cluster_state.list_run_services(self._engine, run), run, since, tail)

    def watch_run(self, run: str) -> Iterator[RunUpdate]:
        recorded_run = RecordedRun(run, self.read_identity(run))
        return watch_run(self._engine, recorded_run, LogScope(since=self._deployed_at.get(run, time.time())), self._timeouts)

    def stream_logs(
        self,
        run: str,
        *,
        follow: bool,
        tail: int | None = None,
        since: float | None = None,
        node: str | None = None,
        report_progress: ProgressReporter | None = None,
    ) -> Iterator[LogLine]:
        services = cluster_state.list_run_services(self._engine, run)
        recorded_run = RecordedRun(run, cluster_state.find_identity(services, run))
        selected = [service for service in services if node in (None, service.get_short_name(run))]
        lines = self._read_log_lines(selected, run, tail, since, None if follow else report_progress)
        if follow:  # it asks again
            return self._follow_logs(recorded_run, LogScope(since, tail, lines, node), report_progress)
        return (line.to_log_line() for line in lines if line.parse_event() is None)

    def build_node_command(self, run: str, node: str, argv: Sequence[str], *, with_terminal: bool) -> NodeCommand:
        """The command reaches the engine of the host over SSH."""
        services = [service for service in cluster_state.list_run_services(self._engine, run) if service.get_short_name(run) == node]
        task = cluster_state.find_newest_task(cluster_state.list_tasks(self._engine, run), services[0].id) if services else None
        if task is None or not task.container_id:
            raise StackError("has no container", place=f"run {run} {node}", hint=f"swarmtrain status {run}")
        docker_argv = self._engine.build_cli_argv()
        if task.node_id != get_engine_node_id(self._engine):
            docker_argv = ["docker", "--host", build_engine_address(self._engine, self._engine.get(f"/nodes/{task.node_id}"))]
        return NodeCommand(tuple(build_exec_argv(docker_argv, task.container_id, argv, with_terminal=with_terminal)))

    def stop_run(self, run: str, report_progress: ProgressReporter) -> None:
        cluster_state.list_run_services(self._engine, run)
        lock = RunLock(self._engine, run, "is stopping it", self._timeouts)
        with lock.hold_lock(report_progress):
            submission.record_stop(self._engine, run, "stopped by a user")
            teardown.stop_nodes(
                self._engine, run, cluster_state.list_run_services(self._engine, run), report_progress, lock.check_lock_held
            )

    def tear_down_run(self, run: str, report_progress: ProgressReporter) -> None:
        existing = cluster_state.read_stack_state(self._engine, run)
        if plan_checks.is_foreign_stack(list(existing.services.values())) or (
            existing.is_empty and run not in cluster_state.list_terminating_runs(self._engine)
        ):
            raise cluster_state.build_run_not_found_error(self._engine, run)
        lock = RunLock(self._engine, run, "is removing it", self._timeouts)
        with lock.hold_lock(report_progress):
            teardown.tear_down_stack(self._engine, run, report_progress, lock.check_lock_held)
        report_progress(f"{run} removed")

    def _plan_reconcile_steps(self, plan: Plan, desired: StackSpecs, new_identity: RunIdentity, *, is_queued: bool) -> list[ReconcileStep]:
        """Return the steps to `desired`, the specs of `plan`. An existing run keeps its identity, or has none; others get `new_identity`.

        `is_queued`: only the scheduler starts nodes.
        """
        existing = cluster_state.read_stack_state(self._engine, desired.stack)
        services = list(existing.services.values())
        if plan_checks.is_foreign_stack(services):
            finding = plan_checks.build_foreign_stack_finding(desired.stack)
            raise StackError(finding.message, place=finding.place, hint=finding.hint)
        identity = cluster_state.find_labelled_identity(services) if services else new_identity
        labelled = add_labels(desired, identity.labels) if identity else desired
        labelled = add_cluster_channels(self._engine, labelled) if is_queued else labelled
        ended_run = self._find_ended_run(services, desired.stack)
        if is_queued:
            labelled = submission.queue_specs(labelled, existing, ended_run, plan, cluster_state.read_inventory(self._engine))
        return reconcile(labelled, existing, ended_run)

    def _build_stack_specs(self, plan: Plan) -> StackSpecs:
        """Return the specs of the stack of `plan`. In the specs of a code layer that is not built yet, the image has no digest."""
        if code_placement.fits_in_configs(plan.cargo.code):
            return self._pin_images(render_stack(plan))
        layer = code_placement.find_layer(self._engine, plan, self._read_deployed_layer(plan.run))
        if layer is not None:
            return self._pin_images(render_stack(code_placement.place_code_in_layer(plan, layer)))
        new_layer, image = code_placement.describe_new_layer(self._engine, plan)
        return build_stack_specs(render_stack(code_placement.place_code_in_layer(plan, new_layer)), {new_layer.image: image})

    def _pin_images(self, desired: Stack) -> StackSpecs:
        images = {service["image"] for service in desired.document["services"].values()}
        return build_stack_specs(desired, {image: pin_image(self._engine, image) for image in images})

    def _place_code(self, plan: Plan, report_progress: ProgressReporter) -> Plan:
        """Return `plan`, or, if it has more code than fits into Swarm configs, with a code layer, which is built if it does not exist."""
        if code_placement.fits_in_configs(plan.cargo.code):
            return plan
        layer = code_placement.find_layer(self._engine, plan, self._read_deployed_layer(plan.run))
        return code_placement.place_code_in_layer(plan, layer or code_placement.build_layer(self._engine, plan, report_progress))

    def _read_deployed_layer(self, run: str) -> code_placement.CodeLayer | None:
        """Return the code layer of the deployed run; None if the run does not exist or has no layer."""
        manifest_path = str(WORKSPACE / code_placement.MANIFEST_NAME)
        for service in cluster_state.read_stack_state(self._engine, run).services.values():
            for item in service.spec["TaskTemplate"]["ContainerSpec"].get("Configs") or []:
                if item["File"]["Name"] == manifest_path:
                    content = deployed_run.read_config_content(self._engine, item["ConfigID"])
                    return code_placement.CodeLayer.from_manifest(RunFile.from_content(code_placement.MANIFEST_NAME, content))
        return None

    def _find_ended_run(self, services: list[cluster_state.Service], run: str) -> EndedRun | None:
        """Return how the run ended if its coordinator has exited, else None. A run without a recorded outcome counts as failed."""
        coordinator = cluster_state.find_coordinator(services, run)
        task = (
            cluster_state.find_newest_task(cluster_state.list_tasks(self._engine, run), coordinator.id)
            if coordinator and coordinator.replicas
            else None
        )
        if task is None or not task.is_final or task.desired_state != "shutdown":
            return None
        outcomes = [RunOutcome(**event.data) for event in self._read_events(services, run) if event.kind == EVENT_OUTCOME]
        return (
            EndedRun(failed=not outcomes[-1].is_success, why=outcomes[-1].reason)
            if outcomes
            else EndedRun(failed=True, why="its coordinator exited without recording an outcome")
        )

    def _read_events(
        self, services: list[cluster_state.Service], run: str, since: float | None = None, tail: int | None = None
    ) -> list[Event]:
        coordinator = cluster_state.find_coordinator(services, run)
        if coordinator is None:
            return []
        replaced_ids = cluster_state.find_replaced_task_ids(cluster_state.list_tasks(self._engine, run), coordinator.id)
        lines = container_logs.read_log_lines(self._engine, coordinator.api_path, RENDEZVOUS_SERVICE, tail=tail, since=since)
        if tail is None:  # recorded lines have no gap
            record_log_lines(RecordedRun(run, cluster_state.find_identity(services, run)), lines)
        # The log of a run that was restarted after its outcome still contains that outcome.
        events_with_task = [(line.parse_event(), line.task) for line in lines]
        return [
            event for event, task in events_with_task if event is not None and not (event.kind == EVENT_OUTCOME and task in replaced_ids)
        ]

    def _read_log_lines(
        self,
        services: list[cluster_state.Service],
        run: str,
        tail: int | None,
        since: float | None,
        report_problem: ProgressReporter | None,
    ) -> list[ContainerLogLine]:
        """Return the available lines of the services' logs, ordered by time."""
        with ThreadPoolExecutor(8, thread_name_prefix="logs") as pool:
            read_service = partial(container_logs.read_log_lines, self._engine, tail=tail, since=since, report_problem=report_problem)
            lines_by_service = list(pool.map(lambda service: read_service(service.api_path, service.get_short_name(run)), services))
        return list(heapq.merge(*lines_by_service, key=lambda line: line.time))

    def _follow_logs(self, recorded_run: RecordedRun, scope: LogScope, report_progress: ProgressReporter | None) -> Iterator[LogLine]:
        record_log_lines(recorded_run, scope.previous_lines)
        yield from (line.to_log_line() for line in scope.previous_lines if line.parse_event() is None)
        for update in watch_run(self._engine, recorded_run, scope, self._timeouts):
            if isinstance(update, LogLine):
                yield update
            elif (
                report_progress
                and isinstance(update, Event)
                and update.kind == EVENT_NOTE
                and update.data["node"] == format_manager_name(self._engine)
            ):
                report_progress(f"{update.data['node']} {update.data['message']}")


def _build_resource_request(plan: Plan) -> ResourceRequest:
    if plan.gpu_mode is not GpuMode.reserve:
        return ResourceRequest(plan.run)
    kind = plan.config.runner.swarm.generic_resource
    return ResourceRequest(plan.run, kind, {node.constraint: node.slots for node in plan.available_nodes})


def _build_startup_tolerance(plan: Plan) -> StartupTolerance:
    """Return which nodes of `plan` a deploy does not wait for. All nodes of a probe must start."""
    max_refused_nodes = 0 if plan.is_probe else max(0, len(plan.available_nodes) - plan.min_nodes)
    return StartupTolerance(frozenset(node.name for node in plan.missing_nodes), max_refused_nodes)
