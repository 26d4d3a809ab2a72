"""The Docker launcher: the nodes of a run are containers on one engine, which need not be in a swarm; usually one node.

The containers have the same names and labels as those that `docker compose` creates from the Compose file that `generate` writes:
swarmtrain and docker compose can each take over a run that the other started. The engine's restart policy restarts failed containers, as
Swarm restarts failed tasks.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner import GpuMode, RunnerConfig
from swarmtrain.config.schema.runner_types import find_capabilities
from swarmtrain.errors import EngineError, RunNotFound, StackError
from swarmtrain.images.transfer_progress import pull_image_if_missing
from swarmtrain.launchers.base import Action, Finding, LogLine, NodeCommand, ProgressReporter, RunOverview, RunUpdate, TaskState
from swarmtrain.launchers.common import container_logs, engine_variants
from swarmtrain.launchers.common.container_logs import EXEC_HINT, MAX_EXEC_FAILURES, read_exec_failure
from swarmtrain.launchers.common.docker_engine import DockerEngine, build_exec_argv, is_not_found_error
from swarmtrain.launchers.common.engine_values import translate_malformed_deployment
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.common.local_run_folder import hold_run_lock, translate_os_errors_in_methods
from swarmtrain.launchers.common.log_recorder import record_log_lines
from swarmtrain.launchers.common.run_overviews import read_overviews
from swarmtrain.launchers.common.stack_file import write_stack_or_compose_file
from swarmtrain.launchers.docker import container_specs, container_state, update_stream
from swarmtrain.launchers.docker.container_state import Container
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import (
    CONFIG_PATH,
    LABEL_CODE,
    LABEL_CONTAINER,
    LABEL_HOSTS,
    LABEL_NOTIFY,
    LABEL_SECRETS,
    RENDEZVOUS_SERVICE,
    Event,
)
from swarmtrain.protocol.run_identity import RunIdentity, create_run_identity
from swarmtrain.render.compose_file import render_compose
from swarmtrain.render.mounts import WORKSPACE
from swarmtrain.render.stack_document import NETWORK_NAME, Stack

_MAX_NODES = 64
_DEFAULT_STOP_GRACE_SECONDS = 10
_STOP_MARGIN_SECONDS = 60.0
_START_CHECK_SECONDS = 0.5


@translate_os_errors_in_methods
class DockerLauncher:
    """Launcher for containers on one Docker engine. Implements swarmtrain.launchers.base.Launcher, which documents each method.

    Commands that change a run are serialized on one machine; commands from two machines are not,
    but the engine refuses to create two containers of the same name.
    """

    capabilities = find_capabilities("docker")

    def __init__(self, address: str | None = None) -> None:
        """Connect to the engine at `address`, by default the one that the docker CLI would use. Raises EngineError if no engine answers."""
        self._engine = DockerEngine(address)
        self._deployed_at: dict[str, float] = {}

    @staticmethod
    def write_deployment_file(plan: Plan, output: Path) -> str:
        return write_stack_or_compose_file(plan, render_compose(plan), output)

    @property
    def location(self) -> str:
        return f"the engine at {self._engine.endpoint}"

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        """There are more machines than any plan needs, all of which are the machine of this engine."""
        return Inventory(self.location, (Machine(host="the engine"),) * _MAX_NODES)

    def check_plan(self, plan: Plan) -> list[Finding]:
        engine_info, image = self._engine.get("/info"), plan.config.runner.docker_config.docker_container
        uses_mounts = bool(plan.config.runner.docker_config.docker_mounts)
        findings = engine_variants.collect_findings(engine_info, self.location, uses_overlay=False, uses_mounts=uses_mounts)
        has_nvidia_runtime = "nvidia" in (engine_info.get("Runtimes") or {})
        if plan.gpu_mode is GpuMode.none and has_nvidia_runtime:
            hint = "to use its GPUs, set -o runner.swarm.gpu=visible, and -o runner.default_gpu_count to their number"
            findings.append(Finding(self.location, "has the nvidia runtime, but the run uses no GPUs", hint, fatal=False))
        if plan.gpu_mode is not GpuMode.none and not has_nvidia_runtime:
            hint = "install the NVIDIA Container Toolkit there, or set -o runner.swarm.gpu=none"
            findings.append(Finding(self.location, "has no nvidia runtime, but the config requests GPUs", hint))
        if not self._find_image_id(plan):
            findings.append(Finding(self.location, f"does not have the image {image}, which will be pulled", fatal=False))
        if plan.world_size > engine_info["NCPU"] and plan.gpu_mode is GpuMode.none:
            findings.append(Finding(self.location, f"{plan.world_size} ranks will share {engine_info['NCPU']} cores", fatal=False))
        return findings

    def plan_changes(self, plan: Plan) -> list[Action]:
        """Raises EngineError if the engine does not answer, StackError if a file of the plan is empty."""
        existing = container_state.list_containers(self._engine, plan.run)
        desired = render_compose(plan)
        unchanged = _find_unchanged_containers(desired, existing, self._find_image_id(plan))
        services = desired.document["services"]
        removals = [Action("remove", name, "is not in the plan") for name in existing if name not in services]
        starts = []
        for name in _sort_services_coordinator_first(desired):
            if name not in existing:
                starts.append(Action("start", name, "is new"))
            elif name not in unchanged:
                starts.append(Action("replace", name, "has changed, or the coordinator is not running", existing[name].is_alive))
            elif not existing[name].is_alive and not existing[name].has_succeeded:
                starts.append(Action("start", name, "has exited"))
        return [*removals, *starts]

    def deploy_run(self, plan: Plan, report_progress: ProgressReporter) -> None:
        self._deployed_at[plan.run] = time.time()
        image = pull_image_if_missing(self._engine.client, plan.config.runner.docker_config.docker_container, report_progress)["Id"]
        desired = render_compose(plan)
        with hold_run_lock(plan.run, report_progress):
            existing = container_state.list_containers(self._engine, plan.run)
            is_first_deploy = not existing
            identity = container_state.find_identity(existing) if existing else create_run_identity()
            try:
                self._reconcile_containers(desired, image, identity, report_progress)
                self._check_that_programs_start(plan.run)
            except BaseException:
                if is_first_deploy:
                    self._remove_run(plan.run, lambda line: None)
                raise

    def _reconcile_containers(self, desired_stack: Stack, image: str, identity: RunIdentity, report_progress: ProgressReporter) -> None:
        existing = container_state.list_containers(self._engine, desired_stack.name)
        unchanged = _find_unchanged_containers(desired_stack, existing, image)
        stale = [container for name, container in existing.items() if name not in unchanged]
        self._stop_containers(desired_stack.name, stale)
        for container in stale:
            self._engine.delete(f"/containers/{container.id}?force=1&v=1")
            if container.node not in desired_stack.document["services"]:
                report_progress(f"{container.node} removed")
        self._ensure_network(desired_stack)
        for name in _sort_services_coordinator_first(desired_stack):
            if name not in unchanged:
                container_id = self._create_container(desired_stack, name, image, identity)
            elif not unchanged[name].is_alive and not unchanged[name].has_succeeded:
                container_id = unchanged[name].id
            else:
                continue
            self._engine.post(f"/containers/{container_id}/start", {})
            report_progress(f"{name} started")

    def _check_that_programs_start(self, run: str) -> None:
        """Wait while the engine restarts containers whose program cannot be started. After 5 attempts, stop them and raise StackError.

        Such a container ends within milliseconds, and the engine starts it again after 0.1, 0.2, 0.4 s and so on.
        """
        reasons = {"": ""}
        while reasons:
            time.sleep(_START_CHECK_SECONDS)
            containers = container_state.list_containers(self._engine, run)
            reasons = {
                node: reason
                for node, container in containers.items()
                if container.restarts and (reason := read_exec_failure(self._engine, container.api_path, node, attempts=1))
            }
            if failed := [containers[node] for node in reasons if containers[node].restarts >= MAX_EXEC_FAILURES]:
                self._stop_containers(run, failed)
                shown = "; ".join(f"{container.node}: {reasons[container.node]}" for container in failed)
                raise StackError(f"cannot be started: {shown}", place=f"run {run}", hint=EXEC_HINT)

    def _create_container(self, desired_stack: Stack, service_name: str, image: str, identity: RunIdentity) -> str:
        """Create the container of `service_name` with its files, and return the container id."""
        container_name = desired_stack.document["services"][service_name]["container_name"]
        request_body = container_specs.build_container_request_body(desired_stack, service_name, image, identity)
        container_id: str = self._engine.post_with_deferred_signals("/containers/create", request_body, {"name": container_name})["Id"]
        if files := container_specs.collect_container_files(desired_stack, service_name):
            self._engine.put_files(container_id, files)
        return container_id

    def _ensure_network(self, desired_stack: Stack) -> None:
        body = container_specs.build_network_request_body(desired_stack)
        if body["Name"] not in {item["Name"] for item in self._engine.list_objects("/networks")}:
            self._engine.post_with_deferred_signals("/networks/create", body)

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        existing = self._list_existing_containers(run)
        node = next((container for name, container in existing.items() if name != RENDEZVOUS_SERVICE), None)
        if node is None:
            raise StackError("has no nodes, only leftovers of an incomplete removal", place=f"run {run}", hint=f"swarmtrain down {run}")
        with translate_malformed_deployment(run):
            config = Config.from_json(self._engine.read_file(node.id, CONFIG_PATH).decode())
            coordinator = existing.get(RENDEZVOUS_SERVICE)
            labels = coordinator.labels if coordinator else {}
            hosts = [HostEntry.parse(host).text for host in json.loads(labels.get(LABEL_HOSTS, "null")) or ()]
            config = config.restore_notify(labels.get(LABEL_NOTIFY, ""))
            runner = config.runner.model_copy(update={"hosts": tuple(hosts) if hosts else None})
            code = json.loads(node.labels[LABEL_CODE])
            digests = [(node, *item) for item in json.loads(node.labels[LABEL_SECRETS]).items()]
            digests += [(coordinator, *item) for item in json.loads(labels.get(LABEL_SECRETS, "{}")).items()] if coordinator else []
            cargo = Cargo(
                tuple(RunFile.from_content(name, self._engine.read_file(node.id, str(WORKSPACE / name))) for name in code),
                tuple(RunFile(name, self._engine.read_file(owner.id, f"/run/secrets/{name}"), digest) for owner, name, digest in digests),
            )
            return config.model_copy(update={"runner": runner}), cargo

    def read_identity(self, run: str) -> RunIdentity:
        return container_state.find_identity(self._list_existing_containers(run))

    def read_placement(self, run: str) -> Placement:
        return FRESH_PLACEMENT

    def list_runs(self) -> list[str]:
        return container_state.list_runs(self._engine)

    def read_overviews(self) -> list[RunOverview]:
        return read_overviews(self)

    def list_terminating_runs(self) -> list[str]:
        """Always empty: a run exists until its last container is removed."""
        return []

    def list_tasks(self, run: str) -> list[TaskState]:
        return [container.to_task_state() for container in self._list_existing_containers(run).values()]

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
        existing = self._list_existing_containers(run)
        coordinator = existing.get(RENDEZVOUS_SERVICE)
        if coordinator is None:
            return []
        lines = container_logs.read_log_lines(self._engine, coordinator.api_path, RENDEZVOUS_SERVICE, tail=tail, since=since)
        if tail is None:
            record_log_lines(RecordedRun(run, container_state.find_identity(existing)), lines)
        return [event for line in lines if (event := line.parse_event())]

    def watch_run(self, run: str) -> Iterator[RunUpdate]:
        recorded_run = RecordedRun(run, self.read_identity(run))
        since = self._deployed_at.get(run, time.time())
        return update_stream.watch_run(self._engine, recorded_run, lambda: container_state.list_containers(self._engine, run), since)

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
        from swarmtrain.launchers.docker.update_stream import stream_logs

        existing = self._list_existing_containers(run)
        selected = [container for name, container in existing.items() if name != RENDEZVOUS_SERVICE and node in (None, name)]
        if follow:
            recorded_run = RecordedRun(run, container_state.find_identity(existing))
            return stream_logs(
                self._engine, recorded_run, lambda: container_state.list_containers(self._engine, run), since=since, tail=tail, node=node
            )
        node_lines = [
            container_logs.read_log_lines(self._engine, container.api_path, container.node, tail=tail, since=since)
            for container in selected
        ]
        return (line.to_log_line() for line in heapq.merge(*node_lines, key=lambda line: line.time))

    def build_node_command(self, run: str, node: str, argv: Sequence[str], *, with_terminal: bool) -> NodeCommand:
        container = self._list_existing_containers(run)[node]
        return NodeCommand(tuple(build_exec_argv(self._engine.build_cli_argv(), container.id, argv, with_terminal=with_terminal)))

    def stop_run(self, run: str, report_progress: ProgressReporter) -> None:
        self._list_existing_containers(run)
        with hold_run_lock(run, report_progress):
            self._stop_containers(
                run, [container for name, container in self._list_existing_containers(run).items() if name != RENDEZVOUS_SERVICE]
            )
        report_progress(f"{run} stopped")

    def tear_down_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Named volumes are kept."""
        self._list_existing_containers(run)
        with hold_run_lock(run, report_progress):
            self._remove_run(run, report_progress)
        report_progress(f"{run} removed")

    def _remove_run(self, run: str, report_progress: ProgressReporter) -> None:
        existing = container_state.list_containers(self._engine, run)
        self._stop_containers(run, list(existing.values()))
        for container in existing.values():
            self._engine.delete(f"/containers/{container.id}?force=1&v=1")
            report_progress(f"{container.node} removed")
        self._engine.delete(f"/networks/{run}_{NETWORK_NAME}")

    def _stop_containers(self, run: str, containers: list[Container]) -> None:
        """Stop containers, each with its own grace period, and record their output.

        Nodes are stopped before the coordinator, because ranks that save still need it.
        """
        if not containers:
            return
        recorded_run = RecordedRun(run, self.read_identity(run))
        nodes = [container for container in containers if container.node != RENDEZVOUS_SERVICE]
        for group in (nodes, [container for container in containers if container.node == RENDEZVOUS_SERVICE]):
            alive = [container for container in group if container.is_alive]
            with ThreadPoolExecutor(max(1, len(alive))) as pool:
                list(pool.map(self._stop_container, alive))
            for container in group:
                record_log_lines(recorded_run, container_logs.read_log_lines(self._engine, container.api_path, container.node))

    def _stop_container(self, container: Container) -> None:
        grace = _DEFAULT_STOP_GRACE_SECONDS
        with suppress(EngineError):
            grace = int(self._engine.get(f"{container.api_path}/json")["Config"]["StopTimeout"])
        patient_engine = DockerEngine(self._engine.address, timeout=grace + _STOP_MARGIN_SECONDS)
        patient_engine.post(f"{container.api_path}/stop?t={grace}", {})

    def _list_existing_containers(self, run: str) -> dict[str, Container]:
        existing = container_state.list_containers(self._engine, run)
        if not existing:
            known_runs = ", ".join(self.list_runs()) or "none"
            raise RunNotFound(f"unknown run on {self.location}; existing runs: {known_runs}", place=f"run {run}")
        return existing

    def _find_image_id(self, plan: Plan) -> str:
        """Return the id of the plan's image on the engine; empty if the engine does not have the image."""
        try:
            return str(self._engine.get(f"/images/{plan.config.runner.docker_config.docker_container}/json")["Id"])
        except EngineError as error:
            if is_not_found_error(error):
                return ""
            raise


def _sort_services_coordinator_first(desired_stack: Stack) -> list[str]:
    return sorted(desired_stack.document["services"], key=lambda name: name != RENDEZVOUS_SERVICE)


def _find_unchanged_containers(desired_stack: Stack, existing: dict[str, Container], image: str) -> dict[str, Container]:
    """Return the existing containers that match the plan.

    The result is empty if the coordinator is not running, because the run is then restarted completely.
    """
    coordinator = existing.get(RENDEZVOUS_SERVICE)
    if coordinator is None or not coordinator.is_alive:
        return {}
    services = desired_stack.document["services"]
    same_image = {name: container for name, container in existing.items() if name in services and container.image == image}
    return {name: container for name, container in same_image.items() if services[name]["labels"][LABEL_CONTAINER] == container.spec_digest}
